"""Images decoded once, then read from a memory map by every process that needs them.

    <key>/pixels.bin    the images one after another, each height × width × 3 bytes
    <key>/index.npy     offset, height and width of each
    <key>/header.json   what it is, how large, its checksums, and which images could not be read

Such a store is filled under another name and renamed at the end, so one called <key> is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock

from proximetry._common import Progress, atomic_write, cache_folder, some
from proximetry.data.catalog import Catalog
from proximetry.data.images import (
    ImageError,
    Interpolation,
    check_interpolation,
    open_image,
    resize_short_side,
)
from proximetry.data.tar_shards import is_shard_path, read_bytes, split_shard_path

Array = npt.NDArray[np.uint8]
_THREADS = min(8, os.cpu_count() or 1)
_UNREADABLE = b"unreadable"
_FORMAT = "proximetry pixels 1"
_BLOCK = 1 << 26


class PixelCache:
    """Images of a catalogue as RGB bytes, all scaled to the same short side.

    Attributes:
        catalog: the images that could be read, in the order of the cache.
        bad: path and reason of those that could not.
        flat: all pixels in one row, uint8; a memory map, or memory of a device after `to`.
        index: offset in `flat`, height and width of each image.
        offsets, heights, widths: the columns of `index`.
    """

    def __init__(
        self,
        catalog: Catalog,
        flat: torch.Tensor,
        index: npt.NDArray[np.int64],
        bad: tuple[tuple[str, str], ...] = (),
        folder: Path | None = None,
    ) -> None:
        if len(catalog) != len(index):
            raise ValueError(f"{len(catalog)} rows in the catalogue, {len(index)} images")
        self.catalog, self.flat, self.bad = catalog, flat, bad
        self.index, self._folder = index, folder
        self.offsets, self.heights, self.widths = (index[:, i] for i in range(3))

    @classmethod
    def build(
        cls,
        catalog: Catalog,
        short_side: int,
        root: str | os.PathLike[str] | None = None,
        *,
        interpolation: Interpolation = "bicubic",
        policy: Literal["error", "skip"] = "error",
        progress: Progress | None = None,
    ) -> PixelCache:
        """Open the cache of these images, decoding them first if nobody has.

        The cache is found by what the image files contain, not by where they lie. Processes
        that ask for the same one at once wait for the first; one that was cut off while
        writing, or has been damaged since, is made again.

        Args:
            catalog: what to decode.
            short_side: pixels of the shorter side after scaling; see `resize_short_side`.
            root: folder of caches; the user's cache folder unless given.
            interpolation: "bicubic" or "bilinear".
            policy: when images cannot be read, "error" raises an ImageError that names them,
                "skip" leaves them out of `catalog` and lists them in `bad`.
            progress: called with (images done, images in all).
        """
        check_interpolation(interpolation)
        if policy not in ("error", "skip"):
            raise ValueError(f"policy must be 'error' or 'skip', got {policy!r}")
        if not 1 <= short_side <= 4096:
            raise ValueError(f"short_side must be from 1 to 4096 pixels, got {short_side}")
        if len(catalog) == 0:
            raise ValueError("the catalogue is empty: there is nothing to decode")
        home = cache_folder() / "pixels" if root is None else Path(root)
        folder = home / _key(catalog, short_side, interpolation, home)
        cache = _try_open(folder, catalog)
        if cache is None:
            with _locked(home / f"{folder.name}.lock") as alone:
                cache = _try_open(folder, catalog)  # another process may have built it
                if cache is None:
                    _clear(folder, alone)
                    _write(folder, _decode_all(catalog, short_side, interpolation, progress))
                    cache = _open(folder, catalog, verify=False)
        _check_bad(cache, len(catalog), policy)
        return cache

    @classmethod
    def in_memory(cls, images: Sequence[Array], catalog: Catalog | None = None) -> PixelCache:
        """Hold H×W×3 uint8 arrays that are already there."""
        for i, image in enumerate(images):
            if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
                raise ValueError(
                    f"image {i} must be uint8 of H×W×3, got {image.dtype} of {image.shape}"
                )
        sizes = np.array([i.shape[:2] for i in images], dtype=np.int64).reshape(-1, 2)
        ends = np.cumsum(3 * sizes.prod(1))
        index = np.column_stack([ends - 3 * sizes.prod(1), sizes])
        flat = np.concatenate([i.ravel() for i in images] or [np.empty(0, np.uint8)])
        if catalog is None:
            names = tuple(f"<array {i}>" for i in range(len(images)))
            catalog = Catalog(names, names, ("all",) * len(images))
        return cls(catalog, torch.from_numpy(flat), index)

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Array:
        """Return one image as a read-only H×W×3 view."""
        view: Array = self.tensor(i).cpu().numpy()
        view.flags.writeable = False
        return view

    def tensor(self, i: int) -> torch.Tensor:
        """Return one image as an H×W×3 view on the device of the cache; not to be written to."""
        offset, height, width = self.index[i].tolist()
        return self.flat[offset : offset + height * width * 3].view(height, width, 3)

    def take(self, rows: Sequence[int] | npt.NDArray[Any]) -> PixelCache:
        """Return some of the images, by number or mask, over the same pixels."""
        catalog = self.catalog.subset(rows)
        index = self.index[np.asarray(rows, dtype=None if len(rows) else np.int64)]
        return PixelCache(catalog, self.flat, index, self.bad, self._folder)

    def to(self, device: torch.device | str) -> PixelCache:
        """Return the same images with the pixels in the memory of a device.

        A GPU without enough free memory is a ValueError that says how much it takes.
        """
        target = torch.device(device)
        needed = self.flat.nbytes
        arrives = target.type == "cuda" and self.flat.device.type != "cuda"
        if arrives and needed > _free(target):
            raise ValueError(_too_large(needed, target))
        try:
            flat = self.flat.to(target)
        except torch.OutOfMemoryError as error:
            raise ValueError(_too_large(needed, target)) from error
        return PixelCache(self.catalog, flat, self.index, self.bad, None)

    def __getstate__(self) -> dict[str, Any]:
        # A memory map is opened again in the other process instead of being copied there.
        state = self.__dict__.copy()
        if self._folder is not None:
            del state["flat"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._folder is not None:
            self.flat = _map(self._folder)


def _free(device: torch.device) -> int:
    """Bytes a new tensor can have: what nobody holds, and what torch holds in reserve."""
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


def _too_large(needed: int, device: torch.device) -> str:
    return (
        f"the pixels need {needed / 2**30:.3f} GiB of {device}, of which "
        f"{_free(device) / 2**30:.3f} GiB are free; use data.cache memory or disk, "
        "or a smaller data.short_side"
    )


def _map(folder: Path) -> torch.Tensor:
    # Mode "c": torch wants memory it could write to; writes would stay in this process.
    return torch.from_numpy(np.memmap(folder / "pixels.bin", dtype=np.uint8, mode="c"))


def _open(folder: Path, catalog: Catalog, *, verify: bool) -> PixelCache:
    index, bad = read_store(folder, verify=verify)
    good = [i for i in range(len(catalog)) if i not in bad]
    reasons = tuple((catalog.paths[i], reason) for i, reason in bad.items())
    flat = _map(folder) if good else torch.empty(0, dtype=torch.uint8)
    return PixelCache(catalog.subset(good), flat, index, reasons, folder if good else None)


def _try_open(folder: Path, catalog: Catalog) -> PixelCache | None:
    try:
        return _open(folder, catalog, verify=True)
    except BrokenStoreError:
        return None


def _clear(folder: Path, alone: bool) -> None:
    """Put away a damaged store, and what killed builders left if no other can be at work."""
    if folder.exists():
        # Renamed first: what bears the name is either a whole store or not there.
        broken = folder.with_name(f".{folder.name}.{uuid4().hex}.part")
        folder.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    if alone:
        for part in folder.parent.glob(f".{folder.name}.*.part"):
            shutil.rmtree(part, ignore_errors=True)


def _check_bad(cache: PixelCache, total: int, policy: str) -> None:
    if not cache.bad or (policy == "skip" and len(cache) > 0):
        return
    listed = some([f"{path}: {reason}" for path, reason in cache.bad])
    hint = "" if len(cache) == 0 else "; policy='skip' leaves them out"
    raise ImageError(f"{len(cache.bad)} of {total} images cannot be read", listed + hint)


def _key(catalog: Catalog, short_side: int, interpolation: str, home: Path) -> str:
    """Digest what the cache depends on: the bytes of every image, and how they are decoded."""
    digest = hashlib.blake2b(digest_size=12)
    facts = (short_side, metadata.version("pillow"), interpolation)
    digest.update(repr(facts).encode())
    digest.update(_contents(catalog, home).encode())
    return digest.hexdigest()


def _contents(catalog: Catalog, home: Path) -> str:
    """Digest the bytes of all images.

    The result is remembered under the names, sizes and times of the files, so that only the
    first call reads them.
    """
    known = home / "contents" / _stamp(catalog)
    if known.is_file():
        return known.read_text(encoding="ascii")
    digest = hashlib.blake2b(digest_size=12)
    with ThreadPoolExecutor(_THREADS) as pool:
        contents = list(pool.map(_content, map(catalog.file, range(len(catalog)))))
    for one in contents:
        digest.update(one)
    # A file that cannot be read may become readable without a new time stamp.
    if _UNREADABLE not in contents:
        known.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(known, digest.hexdigest().encode())
    return digest.hexdigest()


def _content(file: str) -> bytes:
    try:
        return hashlib.blake2b(read_bytes(file), digest_size=16).digest()
    except (OSError, ValueError):
        return _UNREADABLE


def _stamp(catalog: Catalog) -> str:
    digest = hashlib.blake2b(digest_size=12)
    seen: dict[str, tuple[int, int]] = {}
    for i in range(len(catalog)):
        name = os.path.abspath(catalog.file(i))
        file = split_shard_path(name)[0] if is_shard_path(name) else name
        if file not in seen:
            try:
                status = os.stat(file)
                seen[file] = (status.st_size, status.st_mtime_ns)
            except OSError:
                seen[file] = (-1, -1)
        digest.update(f"{name}\0{seen[file]}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _decode_all(
    catalog: Catalog, short_side: int, interpolation: Interpolation, progress: Progress | None
) -> Iterator[tuple[int, Array | str]]:
    """Decode in threads, in order, with only a few images in memory at once."""
    waiting: deque[Future[Array | str]] = deque()
    total, ahead = len(catalog), 4 * _THREADS
    with ThreadPoolExecutor(_THREADS) as pool:
        for row in range(total + ahead):
            if row < total:
                file = catalog.file(row)
                waiting.append(pool.submit(_decode, file, short_side, interpolation))
            done = row - ahead
            if 0 <= done < total:
                yield done, waiting.popleft().result()
                if progress is not None:
                    progress(done + 1, total)


def _decode(file: str, short_side: int, interpolation: Interpolation) -> Array | str:
    """Return the scaled image, or why there is none."""
    try:
        return np.asarray(resize_short_side(open_image(file), short_side, interpolation))
    except ImageError as error:
        return error.reason


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Hold a lock that other processes wait for and that a killed process gives back.

    Gives False where the file system has no locks; renaming keeps the store whole even then.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock, alone = FileLock(file), True
    try:
        lock.acquire()
    except (OSError, NotImplementedError):
        alone = False
    try:
        yield alone
    finally:
        lock.release()


class BrokenStoreError(ValueError):
    """The files are not what their header says."""


def _write(folder: Path, images: Iterable[tuple[int, Array | str]]) -> None:
    """Write (row, pixels or the reason why there are none) pairs into a new store."""
    part = folder.with_name(f".{folder.name}.{uuid4().hex}.part")
    part.mkdir(parents=True)
    try:
        index: list[tuple[int, int, int]] = []
        bad: list[tuple[int, str]] = []
        offset = 0
        with (part / "pixels.bin").open("wb") as stream:
            for row, image in images:
                if isinstance(image, str):
                    bad.append((row, image))
                    continue
                stream.write(np.ascontiguousarray(image).data)
                index.append((offset, *image.shape[:2]))
                offset += image.size
            stream.flush()
            os.fsync(stream.fileno())
        np.save(part / "index.npy", np.array(index, dtype=np.int64).reshape(-1, 3))
        header = {
            "format": _FORMAT,
            "key": folder.name,
            "bytes": offset,
            "index_crc": zlib.crc32((part / "index.npy").read_bytes()),
            "pixels_crc": _checksums(part / "pixels.bin"),
            "bad": bad,
        }
        # A reason may quote a file name that is not UTF-8: JSON escapes it.
        atomic_write(part / "header.json", json.dumps(header).encode())
        try:
            part.rename(folder)
        except OSError:
            # Without locks another process may have been quicker; its store is as good.
            if not (folder / "header.json").is_file():
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def read_store(folder: Path, *, verify: bool) -> tuple[npt.NDArray[np.int64], dict[int, str]]:
    """Return the index, and the rows that could not be read with the reasons.

    What the header says is compared with the files; with `verify` every byte of the pixels too.
    """
    try:
        header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        pixels, index = folder / "pixels.bin", folder / "index.npy"
        found = {
            "format": _FORMAT,
            "key": folder.name,
            "bytes": pixels.stat().st_size,
            "index_crc": zlib.crc32(index.read_bytes()),
        }
        if verify:
            found["pixels_crc"] = _checksums(pixels)
        for name, value in found.items():
            if header[name] != value:
                raise ValueError(f"{name} should be {header[name]!r} and is {value!r}")
        return np.load(index), {int(row): str(reason) for row, reason in header["bad"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BrokenStoreError(f"{folder}: {error!r}") from error


def _checksums(file: Path) -> list[int]:
    """Return the CRC-32 of every block of a file; the blocks are read side by side."""
    starts = range(0, file.stat().st_size, _BLOCK)

    def checksum(start: int) -> int:
        crc, left = 0, _BLOCK
        with file.open("rb") as stream:
            stream.seek(start)
            while left and (piece := stream.read(min(left, 1 << 20))):
                crc, left = zlib.crc32(piece, crc), left - len(piece)
        return crc

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(checksum, starts))
