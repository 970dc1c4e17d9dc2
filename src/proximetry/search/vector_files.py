"""Galleries of files with a vector per row and any other columns, such as paths of images."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from proximetry._util.errors import UsageError
from proximetry._util.types import Progress
from proximetry.data.vectors import read_rows
from proximetry.models import Embedder
from proximetry.models.preprocessing import Tensors
from proximetry.search import metadata
from proximetry.search.exact import FloatArray
from proximetry.search.gallery import Gallery
from proximetry.search.indexing import Model, is_gallery, load_model
from proximetry.search.manifest import Report
from proximetry.search.sync import Changes

_ROW = re.compile(r"\.(npz|npy|parquet)#\d+")


def is_row(path: str) -> bool:
    """Return whether the path of a gallery names the row of a file of vectors."""
    return _ROW.search(path) is not None


def index_vectors(
    file: Path,
    out: str | os.PathLike[str],
    model: Model,
    index: str | None,
    device: str | None,
    *,
    batch_size: int,
    progress: Progress | None,
    report: Report,
) -> tuple[Gallery, Changes]:
    """Build a gallery of the rows of a file of vectors, or add new rows to one.

    A row without the path of an image has the path of the file, #, and its number from 0.
    """
    file = file.expanduser()
    vectors, columns = read_rows(file)
    name = metadata.absolute(os.fspath(file))
    paths = [f"{name}#{row}" for row in range(len(vectors))]
    for row, path in enumerate(columns.get("path", ())):
        if path:
            paths[row] = metadata.absolute(os.path.join(file.parent, path))
    table = metadata.from_columns({**columns, "path": paths})
    exists = is_gallery(out)
    if model is None and not exists:
        if "path" in columns:
            report("without a model, the gallery cannot be searched with other images")
        model = Embedder.create("vectors", None, weights="none", input_dim=vectors.shape[1])
    embedder = load_model(model, out, device, report, takes_images=False)
    vectors = encode_vectors(embedder, vectors, batch_size)
    if not exists:
        options: dict[str, Any] = {"progress": progress, "report": report}
        gallery = Gallery.build(embedder, table, out, index or "auto", vectors=vectors, **options)
        return gallery, Changes(len(gallery))
    gallery = Gallery.open(out, embedder)
    new = np.flatnonzero(~np.array(gallery.contains(paths)))
    if len(new):
        rows = table.take(metadata.arrow().array(new))
        gallery.add(rows, vectors=vectors[new], progress=progress, report=report)
    return gallery, Changes(len(new))


def encode_vectors(embedder: Embedder, vectors: FloatArray, batch_size: int = 64) -> FloatArray:
    """Embed vectors, unless the embedder takes images: then they are its embeddings."""
    if embedder.takes_images:
        if vectors.shape[1] != embedder.dim:
            raise UsageError(
                f"vectors of {vectors.shape[1]} dimensions, but the embedder has {embedder.dim}"
            )
        return vectors
    shape: Sequence[int] = getattr(embedder.preprocessing, "shape", ())
    if tuple(shape) != vectors.shape[1:]:
        raise UsageError(
            f"vectors of {vectors.shape[1]} dimensions, but the embedder takes "
            f"{Tensors(tuple(shape))}"
        )
    return embedder.encode(vectors, batch_size).numpy()


def read_queries(gallery: Gallery, file: Path) -> tuple[FloatArray, list[str]]:
    """Return the vectors of a file as queries of a gallery, and their names."""
    vectors, columns = read_rows(file.expanduser())
    paths = columns.get("path") or [None] * len(vectors)
    names = [path or f"{file}#{row}" for row, path in enumerate(paths)]
    return encode_vectors(gallery.embedder, vectors), names
