"""Images decoded once, then read from a memory map by every process that needs them.

    <key>/pixels.bin    the images one after another, each height × width × 3 bytes
    <key>/index.npy     offset, height and width of each; no height where it could not be read
    <key>/header.json   the checksums of both, and why images could not be read

Such a store is filled under another name and renamed at the end, so one called <key> is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock

from proximetry._common import (
    PART_SUFFIX,
    Progress,
    atomic_write,
    cache_folder,
    chunks,
    cores,
    some,
)
from proximetry.data.catalog import Catalog
from proximetry.data.decoding import Array, decode_all
from proximetry.data.images import (
    MAX_PIXELS,
    ImageError,
    Interpolation,
    check_interpolation,
    image_size,
    scaled_size,
)
from proximetry.data.tar_shards import read_bytes, split_shard_path

_UNREADABLE = b"unreadable"
_FORMAT = "proximetry pixels 2"
_BLOCK = 1 << 26  # bytes to a checksum
_SKIP = "policy='skip' (on the command line: --data.bad-images skip)"


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
        if policy not in ("error", "skip"):
            raise ValueError(f"policy must be 'error' or 'skip', got {policy!r}")
        _check(catalog, short_side, interpolation)
        home = cache_home(root)
        folder = home / _key(_contents(catalog, home), short_side, interpolation)
        found = _open(folder, catalog)
        if found is None:
            with _locked(home / f"{folder.name}.lock") as alone:
                found = _open(folder, catalog)  # another process may have built it
                if found is None:
                    _clear(folder, alone)
                    images = decode_all(_files(catalog), short_side, interpolation, progress)
                    with closing(images):  # however it ends, the decoding processes end too
                        _write(folder, images)
                    found = _open(folder, catalog)
        if found is None:
            raise OSError(f"{folder} does not hold what was just written to it")
        if found.bad and (policy == "error" or len(found) == 0):
            listed = some([f"{path}: {reason}" for path, reason in found.bad])
            hint = f"; {_SKIP} leaves them out" if len(found) else ""
            count = f"{len(found.bad)} of {len(catalog)} images cannot be read"
            raise ImageError(count, listed + hint)
        return found

    @classmethod
    def in_memory(cls, images: Sequence[Array]) -> PixelCache:
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
        names = tuple(f"<array {i}>" for i in range(len(images)))
        return cls(Catalog(names, names, ("all",) * len(images)), torch.from_numpy(flat), index)

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

    def to(self, device: torch.device | str) -> PixelCache:
        """Return the same images with the pixels in the memory of a device.

        A GPU without enough free memory is a ValueError that says how much it takes.
        """
        target = torch.device(device)
        try:
            arrives = target.type == "cuda" and not self.flat.is_cuda
            if arrives and self.flat.nbytes > _free(target):
                raise torch.OutOfMemoryError
            flat = self.flat.to(target)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the pixels need {self.flat.nbytes / 2**30:.3f} GiB of {target}, of which "
                f"{_free(target) / 2**30:.3f} GiB are free; use data.cache memory or disk, "
                "or a smaller data.short_side"
            ) from error
        return PixelCache(self.catalog, flat, self.index, self.bad)

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


def estimate(
    catalog: Catalog,
    short_side: int,
    root: str | os.PathLike[str] | None = None,
    *,
    interpolation: Interpolation = "bicubic",
) -> tuple[bool, int]:
    """Return whether the cache that `PixelCache.build` would open is there, and its bytes.

    Reads the headers of at most 1 000 images. So a cache that was built from the same images in
    another place is found by `build`, but not here.
    """
    _check(catalog, short_side, interpolation)
    home = cache_home(root)
    known = _remembered(catalog, home)
    if known.is_file():
        contents = known.read_text(encoding="ascii")
        file = home / _key(contents, short_side, interpolation) / "pixels.bin"
        if file.is_file():
            return True, file.stat().st_size
    total = len(catalog)
    files = [catalog.file(i) for i in range(0, total, -(-total // 1000))]
    sizes = [_scaled_bytes(file, short_side) for file in files]
    return False, round(sum(sizes) / len(sizes) * total)


def _scaled_bytes(file: str, short_side: int) -> int:
    try:
        width, height = scaled_size(*image_size(file), short_side)
    except ImageError:
        return 0
    return 3 * width * height if width * height <= MAX_PIXELS else 0  # too narrow to scale


def _check(catalog: Catalog, short_side: int, interpolation: str) -> None:
    check_interpolation(interpolation)
    if not 1 <= short_side <= 4096:
        raise ValueError(f"short_side must be from 1 to 4096 pixels, got {short_side}")
    if len(catalog) == 0:
        raise ValueError("the catalogue is empty: there is nothing to decode")


def cache_home(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of caches: the one given, or the user's."""
    return cache_folder() / "pixels" if root is None else Path(root)


def _free(device: torch.device) -> int:
    """Bytes a new tensor can have: what nobody holds, and what torch holds in reserve."""
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


def _map(folder: Path) -> torch.Tensor:
    file = folder / "pixels.bin"
    if file.stat().st_size == 0:  # no image could be read; an empty file cannot be mapped
        return torch.empty(0, dtype=torch.uint8)
    # Mode "c": torch wants memory it could write to; writes would stay in this process.
    return torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="c"))


def _checksums(folder: Path) -> dict[str, Any]:
    pixels = _map(folder).numpy()
    with ThreadPoolExecutor(cores()) as pool:
        blocks = pool.map(zlib.crc32, [pixels[block] for block in chunks(len(pixels), _BLOCK)])
    return {
        "bytes": len(pixels),
        "index_crc": zlib.crc32((folder / "index.npy").read_bytes()),
        "pixels_crc": list(blocks),
    }


def _open(folder: Path, catalog: Catalog) -> PixelCache | None:
    """Return the cache in a folder, or None where there is none or it has been damaged."""
    try:
        header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        reasons = header.pop("bad")
        if header != {"key": folder.name, **_checksums(folder)}:
            return None
        index = np.load(folder / "index.npy")
        good = index[:, 1] > 0
        bad = zip(catalog.subset(~good).paths, reasons, strict=True)
        return PixelCache(catalog.subset(good), _map(folder), index[good], tuple(bad), folder)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _part(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.{uuid4().hex}{PART_SUFFIX}")


def _clear(folder: Path, alone: bool) -> None:
    """Put away a damaged store, and what killed builders left if no other can be at work."""
    broken = _part(folder)
    if folder.exists():
        folder.rename(broken)  # so that what bears the name is either a whole store or not there
    left = folder.parent.glob(f".{folder.name}.*{PART_SUFFIX}")
    for part in left if alone else [broken]:
        shutil.rmtree(part, ignore_errors=True)


def _write(folder: Path, images: Iterable[Array | str]) -> None:
    """Write a new store of images, or of the reasons why they could not be read."""
    part = _part(folder)
    part.mkdir(parents=True)
    try:
        index: list[tuple[int, int, int]] = []
        reasons: list[str] = []
        offset = 0
        # Not forced to the disk, which takes seconds: what a power cut spoils does not have its
        # checksum, and is made again.
        with (part / "pixels.bin").open("wb") as stream:
            for image in images:
                if isinstance(image, str):
                    reasons.append(image)
                    index.append((offset, 0, 0))
                else:
                    stream.write(image.data)
                    index.append((offset, *image.shape[:2]))
                    offset += image.size
        np.save(part / "index.npy", np.array(index, dtype=np.int64))
        header = {"key": folder.name, **_checksums(part), "bad": reasons}
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


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=12).hexdigest()


def _key(contents: str, short_side: int, interpolation: str) -> str:
    """Digest what the cache depends on: the bytes of every image, and how they are decoded."""
    facts = (_FORMAT, short_side, metadata.version("pillow"), interpolation)
    return _digest([repr(facts).encode(), contents.encode()])


def _contents(catalog: Catalog, home: Path) -> str:
    """Digest the bytes of all images, which only the first call reads."""
    known = _remembered(catalog, home)
    if known.is_file():
        return known.read_text(encoding="ascii")
    with ThreadPoolExecutor(cores()) as pool:
        contents = list(pool.map(_content, _files(catalog)))
    digest = _digest(contents)
    # A file that cannot be read may become readable without a new time stamp.
    if _UNREADABLE not in contents:
        known.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(known, digest.encode())
    return digest


def _remembered(catalog: Catalog, home: Path) -> Path:
    """Return the file that remembers the digest, named by names, sizes and times of the images."""
    return home / "contents" / _stamp(catalog)


def _files(catalog: Catalog) -> list[str]:
    return [catalog.file(i) for i in range(len(catalog))]


def _content(file: str) -> bytes:
    try:
        return hashlib.blake2b(read_bytes(file), digest_size=16).digest()
    except (OSError, ValueError):
        return _UNREADABLE


def _stamp(catalog: Catalog) -> str:
    @cache  # a tar shard is asked for once, not for each of its members
    def state(file: str) -> tuple[int, int]:
        try:
            status = os.stat(file)
        except OSError:
            return -1, -1
        return status.st_size, status.st_mtime_ns

    names = map(os.path.abspath, _files(catalog))
    lines = (f"{name}\0{state(split_shard_path(name)[0])}\0" for name in names)
    return _digest(line.encode(errors="surrogateescape") for line in lines)


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Hold a lock that other processes wait for and that a killed process gives back.

    Gives False where the file system has no locks; renaming keeps the store whole even then.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    with suppress(OSError, NotImplementedError):
        lock.acquire()
    try:
        yield lock.is_locked
    finally:
        lock.release()
