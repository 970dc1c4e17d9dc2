"""`Segment`: rows that were written together; write and check the files of a gallery."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from proximetry._util.files import name_write_errors, sync_folder
from proximetry._util.tensors import chunks
from proximetry._util.types import IntArray, Progress
from proximetry.metrics._search.similarities import normalize
from proximetry.search import indexes, metadata
from proximetry.search.exact import FloatArray, Part, Store
from proximetry.search.manifest import (
    FILES,
    SEGMENTS,
    DamagedGalleryError,
    DeletedIds,
    FileInfo,
    Manifest,
    SegmentInfo,
    read_file_info,
)

BLOCK = 65_536  # vectors written at a time
_RECALL_QUERIES = 256
_MAX_ENTRY = 1e15  # the squares of larger entries of vectors would overflow float32


def prepare_vectors(vectors: FloatArray, manifest: Manifest) -> FloatArray:
    """Prepare vectors for storing and searching: unit length if compared by cosine."""
    if manifest.similarity == "cosine":
        return normalize(torch.from_numpy(np.ascontiguousarray(vectors))).numpy()
    if len(vectors) and np.abs(vectors).max() > _MAX_ENTRY:
        raise ValueError(f"vectors have entries above {_MAX_ENTRY:g}. Scale them down.")
    return vectors


def write_segment(
    folder: Path,
    manifest: Manifest,
    table: Any,
    ids: IntArray,
    blocks: Iterable[FloatArray],
    index: str,
    progress: Progress,
) -> SegmentInfo:
    """Write rows with their prepared vectors, and an index unless `index` is ""."""
    name, count = uuid4().hex, len(ids)
    parent = folder / SEGMENTS / name
    paths = {kind: parent / file for kind, file in FILES.items()}
    with name_write_errors(parent):
        parent.mkdir(parents=True)
        with paths["vectors"].open("wb") as stream:
            header = {"descr": "<f4", "fortran_order": False, "shape": (count, manifest.dim)}
            np.lib.format.write_array_header_1_0(stream, header)
            for block in blocks:
                stream.write(np.ascontiguousarray(block, np.float32).data)
        vectors = open_array(paths["vectors"], (count, manifest.dim), np.float32)
        blocks_64 = (vectors[part].astype(np.float64) for part in chunks(count, 4096))
        squares_64 = np.concatenate([np.square(block).sum(1) for block in blocks_64])
        longest = float(np.sqrt(squares_64.max()))
        _save(paths["ids"], ids)
        with paths["rows"].open("wb") as stream:
            metadata.write(table, stream)
        squares = squares_64.astype(np.float32) if manifest.similarity == "euclidean" else None
        if squares is not None:
            _save(paths["squares"], squares)
        effort, recall = 1, None
        if index:
            indexes.build(index, vectors, manifest.similarity, paths["index"], progress)
            store = Store([vectors], np.array([0, count]), manifest.similarity, longest)
            built = indexes.Index(paths["index"], index)
            effort, recall = _calibrate(built, store, Part(vectors, squares, 0))
        files = {kind: _flush(file) for kind, file in paths.items() if file.exists()}
    sync_folder(parent)
    sync_folder(parent.parent)
    return SegmentInfo(name, count, index, longest, files, effort, recall)


def copy_segment(folder: Path, info: SegmentInfo, table: Any) -> SegmentInfo:
    """Write a segment with other metadata; its other files are links to those of `info`."""
    copied = replace(info, name=uuid4().hex)
    parent, files = folder / SEGMENTS / copied.name, info.paths(folder)
    with name_write_errors(parent):
        parent.mkdir()
        for kind, file in copied.paths(folder).items():
            if kind == "rows":
                with file.open("wb") as stream:
                    metadata.write(table, stream)
                rows = _flush(file)
                continue
            try:
                os.link(files[kind], file)
            except OSError:  # the file system has no links
                shutil.copyfile(files[kind], file)
                _flush(file)
    sync_folder(parent)
    sync_folder(parent.parent)
    return replace(copied, files={**info.files, "rows": rows})


def _save(file: Path, array: npt.NDArray[Any]) -> None:
    buffer = io.BytesIO()  # np.save does not report a full disk
    np.save(buffer, array)
    file.write_bytes(buffer.getbuffer())


def _flush(file: Path) -> FileInfo:
    """Flush a new file to disk, and return its size and checksum."""
    with file.open("rb+") as stream:
        os.fsync(stream.fileno())
    return read_file_info(file)


def _calibrate(index: indexes.Index, store: Store, part: Part) -> tuple[int, float]:
    """Double the effort of an index until recall@10 is `RECALL`; return effort and recall.

    Recall is measured against an exact scan, with a sample of the rows as queries.
    """
    count = len(part.vectors)
    sample = np.random.default_rng(0).choice(count, min(count, _RECALL_QUERIES), replace=False)
    queries, k = part.vectors[np.sort(sample)], min(11, count)  # the query itself is a result
    farthest = store.search([part], queries, k).scores[:, -1:]
    while True:
        scores = store.rescore(queries, index.candidates(queries, k), k).scores
        recall = float((scores[:, 1:] >= farthest).mean())
        if recall >= indexes.RECALL or index.effort >= indexes.MAX_EFFORT:
            return index.effort, recall
        index.effort *= 2


def write_deleted(folder: Path, ids: IntArray) -> DeletedIds | None:
    """Write the removed ids."""
    if not len(ids):
        return None
    file = folder / f"deleted-{uuid4().hex}.npy"
    with name_write_errors(file):
        _save(file, ids)
        return DeletedIds(file.name, len(ids), _flush(file))


def open_array(file: Path, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Map a file of an expected shape and type into memory."""
    try:
        # Copy-on-write, as torch does not accept read-only arrays.
        array = np.lib.format.open_memmap(file, mode="c")
    except FileNotFoundError:
        raise
    except Exception as error:  # numpy parses the header as Python
        raise DamagedGalleryError(file, error) from error
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise DamagedGalleryError(
            file, f"it has {array.dtype} of shape {array.shape}, not {np.dtype(dtype)} of {shape}"
        )
    return np.asarray(array)


def check_file(file: Path, info: FileInfo, *, digest: bool = True) -> None:
    """Compare the size of a file, and its checksum, with the manifest."""
    size = file.stat().st_size
    if size != info.bytes:
        raise DamagedGalleryError(file, f"it has {size} bytes, not {info.bytes}")
    if digest and read_file_info(file) != info:
        raise DamagedGalleryError(file, "its checksum differs from the manifest")


def check_segment(folder: Path, info: SegmentInfo) -> None:
    """Compare all files of a segment with their checksums."""
    for kind, file in info.paths(folder).items():
        check_file(file, info.files[kind])


@dataclass(frozen=True)
class Segment:
    """An open segment, memory-mapped."""

    part: Part  # all vectors
    ids: IntArray
    table: Any  # of metadata
    index: indexes.Index | None

    @classmethod
    def open(cls, folder: Path, manifest: Manifest, info: SegmentInfo, start: int) -> Segment:
        """Open every file of a segment; raises FileNotFoundError for a missing one."""
        files = info.paths(folder)
        for kind, file_info in info.files.items():
            # The ids are small, and everything else depends on them.
            check_file(files[kind], file_info, digest=kind == "ids")
        table = metadata.read(files["rows"])
        if len(table) != info.rows:
            raise DamagedGalleryError(files["rows"], f"it has {len(table)} rows, not {info.rows}")
        for name in ("path", "label"):
            kind = metadata.column_type(table, name)
            if kind is None or not metadata.arrow().types.is_large_binary(kind):
                raise DamagedGalleryError(files["rows"], f"its column {name} is {kind}")
        squares = None
        if "squares" in files:
            squares = open_array(files["squares"], (info.rows,), np.float32)
        vectors = open_array(files["vectors"], (info.rows, manifest.dim), np.float32)
        return cls(
            Part(vectors, squares, start),
            open_array(files["ids"], (info.rows,), np.int64),
            table,
            indexes.Index(files["index"], info.index, info.effort) if info.index else None,
        )
