"""The pixel cache: images decoded once, then read from a memory map by every process.

    <key>/pixels.bin    the images one after another, each height × width × 3 bytes
    <key>/index.npy     offset, height and width of each image; height 0 if it cannot be read
    <key>/header.json   sizes, checksums, unreadable images, and the source of the cache
    <key>.lock          locked by the process that writes <key>

The key is a digest of names, sizes and modification times of the image files and of how they are
decoded. A cache is written under a temporary name and renamed, so <key> is always complete. The
modification time of the header is the time of last use: the least recently used caches are removed
to stay below `MAX_CACHE_BYTES` and `DISK_SHARE`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, TypeAlias
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch

from proximetry._util.files import (
    DISK_SHARE,
    MAX_CACHE_BYTES,
    PART_SUFFIX,
    acquire_lock,
    atomic_write,
    cache_folder,
    name_write_errors,
    size_and_mtime,
)
from proximetry._util.formatting import join_first
from proximetry._util.types import Progress
from proximetry.data.caches import remove_cache
from proximetry.data.catalog import Catalog
from proximetry.data.folders import shard_members, split_shard_path
from proximetry.data.images import (
    ImageError,
    Interpolation,
    Size,
    check_interpolation,
    describe_size,
    image_size,
    open_bytes,
    scaled_size,
)
from proximetry.data.loader import Array, Pixels, decode, parallel_map

_FORMAT = "proximetry pixels 5"
_LOCK_SECONDS = 30 * 86_400.0  # to wait for another process
_CHECKS = {"bodies": "full decode", "headers": "headers only"}

Policy: TypeAlias = Literal["error", "skip"]
Bad: TypeAlias = tuple[tuple[str, str], ...]  # path and reason of unreadable images
Root: TypeAlias = "str | os.PathLike[str] | None"


class PixelCache(Pixels):
    """Resized images of a catalog as RGB bytes.

    Attributes:
        catalog: the readable images, in the order of the cache.
        bad: path and reason of the unreadable ones.
        flat: the pixels of all images, uint8; a memory map, or on a device after `to`.
        index: offset in `flat`, height and width of each image.
        digest: checksum of the pixels.
    """

    def __init__(
        self,
        catalog: Catalog,
        flat: torch.Tensor,
        index: npt.NDArray[np.int64],
        bad: Bad = (),
        folder: Path | None = None,
        digest: str = "",
    ) -> None:
        super().__init__(flat, index)
        self.catalog, self.bad, self.digest, self._folder = catalog, bad, digest, folder

    @classmethod
    def build(
        cls,
        catalog: Catalog,
        size: Size,
        root: Root = None,
        *,
        interpolation: Interpolation = "bicubic",
        policy: Policy = "error",
        progress: Progress | None = None,
        on_start: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> PixelCache:
        """Open the cache of these images; decode them first if there is none.

        Processes that open the same cache wait for the first one, which decodes the images.

        Args:
            catalog: the images.
            size: short side after resizing, or height and width.
            root: folder of caches; the user's cache folder by default.
            interpolation: "bicubic" or "bilinear".
            policy: "error" raises an ImageError that names unreadable images, "skip" removes them
                from `catalog` and lists them in `bad`.
            progress: called with (images done, total).
            on_start: called before decoding.
            on_wait: called before waiting for another process that decodes them.
        """
        if policy not in ("error", "skip"):
            raise ValueError(f"policy must be 'error' or 'skip', got {policy!r}")
        settings = _Settings(size, interpolation)
        folder, header = _open_or_build(catalog, settings, root, progress, on_start, on_wait)
        index = np.load(folder / "index.npy")
        good = index[:, 1] > 0
        bad = tuple(zip(catalog.subset(~good).paths, header["bad"].values(), strict=True))
        if bad:
            raise_unreadable(bad, len(catalog), policy)
            catalog = catalog.subset(good)
        if header["copies"]:
            catalog = replace(catalog, notes=(*catalog.notes, *header["copies"]))
        # Mode "c": torch requires writable memory; writes would stay in this process.
        flat = torch.from_numpy(np.memmap(folder / "pixels.bin", dtype=np.uint8, mode="c"))
        return cls(catalog, flat, index[good], bad, folder, header["digest"])

    @classmethod
    def in_memory(cls, images: Iterable[Array]) -> PixelCache:
        """Create a cache from H×W×3 uint8 arrays.

        Examples:
            >>> cache = PixelCache.in_memory([np.zeros((40, 60, 3), np.uint8)])
            >>> len(cache), cache[0].shape
            (1, (40, 60, 3))
        """
        arrays = list(images)
        for i, image in enumerate(arrays):
            if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8 or not image.size:
                raise ValueError(
                    f"image {i} must be uint8 of H×W×3, got {image.dtype} of {image.shape}"
                )
        names = tuple(f"<array {i}>" for i in range(len(arrays)))
        pixels = Pixels.concatenate(arrays)
        return cls(Catalog(names, names, ("all",) * len(names)), pixels.flat, pixels.index)

    def __getitem__(self, i: int) -> Array:
        """Return one image as a read-only H×W×3 view."""
        view: Array = self.tensor(i).cpu().numpy()
        view.flags.writeable = False
        return view

    def to(self, device: torch.device | str) -> PixelCache:
        """Return the same images with the pixels in the memory of a device.

        Raises:
            ValueError: the GPU has not enough free memory.
        """
        try:
            flat = self.flat.to(device)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the pixels need {self.flat.nbytes / 2**30:.3f} GiB of {device}, where "
                f"{torch.cuda.mem_get_info(device)[0] / 2**30:.3f} GiB are free. Use data.cache "
                "pixels or none, or a smaller data.short_side."
            ) from error
        return PixelCache(self.catalog, flat, self.index, self.bad, digest=self.digest)

    def check_size(self) -> None:
        """Raise an OSError if the file was truncated: reading past its end kills the process."""
        if self._folder is not None:
            file = self._folder / "pixels.bin"
            with suppress(FileNotFoundError):  # a removed file stays mapped
                if (size := file.stat().st_size) < len(self.flat):
                    raise OSError(
                        f"{file} was truncated to {size} bytes while in use. Run the same command "
                        "again to rebuild it and resume."
                    )


@dataclass(frozen=True)
class _Settings:
    """Settings of a pixel cache or of a cached readability check."""

    size: Size
    interpolation: Interpolation
    content: Literal["pixels", "bodies", "headers"] = "pixels"

    def key(self, catalog: Catalog) -> str:
        """Return the name of the cache: a digest of settings, file names, sizes and times."""
        check_interpolation(self.interpolation)
        sides = (self.size,) if isinstance(self.size, int) else self.size
        if not 1 <= min(sides) <= max(sides) <= 4096:
            size = describe_size(self.size)
            raise ValueError(f"size must be 1 to 4096 pixels, got {size}")
        if len(catalog) == 0:
            raise ValueError("the catalog is empty. Add images.")
        facts = (_FORMAT, self.size, self.interpolation, self.content, metadata.version("pillow"))
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=12)
        digest.update(os.path.abspath(catalog.root).encode(errors="surrogateescape"))
        for path in catalog.paths:
            digest.update(path.encode(errors="surrogateescape") + b"\0")
        digest.update(_file_states(catalog).tobytes())
        return digest.hexdigest()

    def read(self, file: str) -> Array | ImageError | None:
        """Return the pixels of an image, None if they are not cached, or why it is unreadable."""
        if self.content != "headers":
            image = decode(file, self.size, self.interpolation)
            return image if self.content == "pixels" or isinstance(image, ImageError) else None
        try:
            scaled_size(*image_size(file), self.size, file)
            return None
        except ImageError as error:
            return error


def _file_states(catalog: Catalog) -> npt.NDArray[np.int64]:
    """Return size and modification time of each image; -1 if it does not exist."""
    states = np.full((len(catalog), 2), -1, np.int64)
    for row, path in enumerate(catalog.paths):
        name, member = split_shard_path(os.path.join(catalog.root, path))
        with suppress(OSError, ValueError, KeyError):
            status = os.stat(name)
            size = shard_members(name)[member][1] if member else status.st_size
            states[row] = size, status.st_mtime_ns
    return states


def _open_or_build(
    catalog: Catalog,
    settings: _Settings,
    root: Root,
    progress: Progress | None,
    on_start: Callable[[], None] = lambda: None,
    on_wait: Callable[[], None] = lambda: None,
) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a cache and its header."""
    home = cache_home(root)
    folder = home / settings.key(catalog)
    header = _read_header(folder, catalog)
    if header is None:
        home.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            lock = acquire_lock(home / f"{folder.name}.lock", _LOCK_SECONDS, lambda _: on_wait())
            stack.callback(lock.release)
            header = _read_header(folder, catalog)  # another process may have built it
            if header is None:
                on_start()
                for leftover in (folder, *home.glob(f".{folder.name}.*{PART_SUFFIX}")):
                    shutil.rmtree(leftover, ignore_errors=True)
                header = _write(folder, catalog, settings, progress)
                _remove_least_recently_used(home, keep=folder)
    with suppress(OSError):  # a read-only cache is usable, too
        os.utime(folder / "header.json")
    return folder, header


def _read_header(folder: Path, catalog: Catalog) -> dict[str, Any] | None:
    """Return the header of a complete cache; None if it is missing, truncated or outdated."""
    try:
        header: dict[str, Any] = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        for name in ("pixels.bin", "index.npy"):
            if (folder / name).stat().st_size != header["bytes"][name]:
                return None
        for row in header["retry"]:  # a file may have become readable
            with suppress(ImageError), open_bytes(catalog.file(row)):
                return None
        return header
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(
    folder: Path, catalog: Catalog, settings: _Settings, progress: Progress | None
) -> dict[str, Any]:
    """Decode images into a new cache; return its header."""
    part = folder.with_name(f".{folder.name}.{uuid4().hex}{PART_SUFFIX}")
    part.mkdir()
    try:
        total, offset, checksum = len(catalog), 0, 0
        index = np.zeros((total, 3), np.int64)
        bad: dict[int, ImageError] = {}
        files = (catalog.file(row) for row in range(total))
        with (
            name_write_errors(folder),
            (part / "pixels.bin").open("wb") as stream,
            closing(parallel_map(settings.read, files)) as images,
        ):
            for row, image in enumerate(images):
                if isinstance(image, ImageError):
                    bad[row] = image
                elif image is not None:
                    index[row] = offset, *image.shape[:2]
                    offset += stream.write(image.data)
                    checksum = zlib.crc32(image.data, checksum)
                if progress is not None:
                    progress(row + 1, total)
        with name_write_errors(folder):
            np.save(part / "index.npy", index)
        if settings.key(catalog) != folder.name:
            raise ImageError("images changed while they were decoded", "run the command again")
        pixels = settings.content == "pixels"
        header = {
            "bytes": {name: (part / name).stat().st_size for name in ("pixels.bin", "index.npy")},
            "digest": f"pixels:{checksum:08x}{zlib.crc32(index.tobytes()):08x}",
            "bad": {row: error.reason for row, error in bad.items()},
            "retry": [row for row, error in bad.items() if error.transient],
            "copies": describe_duplicates(catalog) if pixels else [],
            "root": os.path.abspath(catalog.root),
            "images": total,
            "about": f"{describe_size(settings.size)}, {settings.interpolation}"
            + ("" if pixels else f", readability check ({_CHECKS[settings.content]})"),
        }
        # A reason may quote a file name that is not UTF-8: JSON escapes it.
        atomic_write(part / "header.json", json.dumps(header).encode())
        with name_write_errors(folder):
            part.rename(folder)
        return header
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _remove_least_recently_used(home: Path, keep: Path) -> None:
    """Remove the oldest caches until all of them are within the limits."""
    caches = [
        (*size_and_mtime(header.parent), header.parent) for header in home.glob("*/header.json")
    ]
    size = sum(freed for freed, _, _ in caches)
    limit = min(MAX_CACHE_BYTES, DISK_SHARE * (shutil.disk_usage(home).free + size))
    for freed, _, folder in sorted(caches, key=itemgetter(1)):
        if size > limit and folder != keep and remove_cache(folder):
            size -= freed


def is_intact(folder: Path) -> bool:
    """Return whether the pixels of a cache are those that were written."""
    header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
    checksum = 0
    with (folder / "pixels.bin").open("rb") as stream:
        while block := stream.read(1 << 24):
            checksum = zlib.crc32(block, checksum)
    index = zlib.crc32(np.load(folder / "index.npy").tobytes())
    return bool(header["digest"] == f"pixels:{checksum:08x}{index:08x}")


def estimate(
    catalog: Catalog, size: Size, root: Root = None, *, interpolation: Interpolation = "bicubic"
) -> tuple[bool, int]:
    """Return whether the cache that `PixelCache.build` would open exists, and its bytes.

    Without a cache, the headers of at most 1 000 images are read.
    """
    file = cache_home(root) / _Settings(size, interpolation).key(catalog) / "pixels.bin"
    if file.is_file():
        return True, file.stat().st_size
    total, sampled_bytes = len(catalog), 0
    rows = range(0, total, -(-total // 1000))
    for row in rows:
        with suppress(ImageError):
            width, height = scaled_size(*image_size(catalog.file(row)), size)
            sampled_bytes += 3 * width * height
    return False, round(sampled_bytes / len(rows) * total)


def unreadable_images(
    catalog: Catalog,
    size: Size,
    interpolation: Interpolation,
    policy: Policy,
    root: Root = None,
    progress: Progress | None = None,
) -> Bad:
    """Return path and reason of unreadable images, before they are decoded on the fly.

    Policy "error" reads the headers and raises an ImageError; "skip" decodes every image, as
    `PixelCache.build` does. The result is cached until a file changes.
    """
    settings = _Settings(size, interpolation, "bodies" if policy == "skip" else "headers")
    _, header = _open_or_build(catalog, settings, root, progress)
    bad = tuple((catalog.paths[int(row)], reason) for row, reason in header["bad"].items())
    raise_unreadable(bad, len(catalog), policy)
    return bad


def raise_unreadable(bad: Bad, total: int, policy: str) -> None:
    """Raise an ImageError about unreadable images, unless they are skipped."""
    if bad and (policy == "error" or len(bad) == total):
        lines = join_first([f"{path}: {reason}" for path, reason in bad])
        hint = ". Skip them with --data.bad-images skip." if len(bad) < total else ""
        raise ImageError(f"{len(bad)} of {total} images cannot be read", lines + hint)


def describe_duplicates(catalog: Catalog) -> list[str]:
    """Describe duplicate images; read only images of equal size."""
    sizes = _file_states(catalog)[:, 0].tolist()
    counts, codes = Counter(sizes), catalog.codes
    rows = [row for row, size in enumerate(sizes) if counts[size] > 1 and size >= 0]
    originals: dict[str, int] = {}
    duplicates: dict[bool, list[str]] = {True: [], False: []}  # by whether the classes are the same
    digests = parallel_map(_file_digest, (catalog.file(row) for row in rows))
    for row, digest in zip(rows, digests, strict=True):
        original = originals.setdefault(digest, row) if digest else row
        if original != row:
            same_class = bool(codes[original] == codes[row])
            duplicates[same_class].append(f"{catalog.paths[row]} (of {catalog.paths[original]})")
    conflict = "in different classes, so one of the two labels is wrong"
    return [
        f"duplicate images {where} ({len(duplicates[same])}): {join_first(duplicates[same])}"
        for same, where in ((True, "in the same class"), (False, conflict))
        if duplicates[same]
    ]


def _file_digest(file: str) -> str:
    with suppress(ImageError, OSError), open_bytes(file) as stream:
        return hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=16)).hexdigest()
    return ""


def cache_home(root: Root = None) -> Path:
    """Return the folder of pixel caches: `root`, or the user's cache folder."""
    return cache_folder() / "pixels" if root is None else Path(root)
