"""Images decoded once, then read from a memory map by every process that needs them.

    <key>/pixels.bin    the images one after another, each height × width × 3 bytes, or encoded
    <key>/index.npy     offset, height and width of each; no height where it could not be read;
                        offset, 1 and bytes of encoded ones
    <key>/header.json   the checksums of both, and why images could not be read

Such a store is filled under another name and renamed at the end, so one called <key> is complete.
The key stands for the bytes of the images, and all that is kept follows from them: not that a file
could not be opened, which may pass.

    contents/<states>   digests of the bytes of all images, by names, sizes and times of the files
    checked/<states>    which images cannot be read on the fly, likewise
    <states>.lock       locked by the process that decodes these files; the others wait for it
    <key>.used          who used a store, and when (`cache_records`)
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeGuard, TypeVar
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import torch
from filelock import FileLock, Timeout

from proximetry._util.errors import Progress, some
from proximetry._util.files import PART_SUFFIX, atomic_write, cache_folder, writing
from proximetry._util.machine import cores
from proximetry._util.tensors import chunks
from proximetry.data.cache_records import InUse, note_use
from proximetry.data.catalog import Catalog
from proximetry.data.decoding import ENCODED, Array, check_all, decode_all
from proximetry.data.images import (
    ImageError,
    Interpolation,
    Size,
    check_header,
    check_interpolation,
    described_size,
    open_bytes,
)
from proximetry.data.shards import file_state, shard_members, split_shard_path

_FORMAT = "proximetry pixels 4"
_BLOCK = 1 << 26  # bytes to a checksum
_DIGEST = 16  # bytes to a digest
_ENCODED_SHARE = 0.35  # of the bytes of pixels, for most photographs
_TICK = 0.02  # seconds within which two changes of a file may bear the same time

Cache = TypeVar("Cache", bound="PixelCache")
State = tuple[int, ...]
"""Size, times and number of a file; nothing where there is none."""
Content = bytes | ImageError
"""The digest of the bytes of an image, or why they could not be read."""


class Pixels:
    """RGB bytes of images.

    Attributes:
        flat: all pixels in one row, uint8.
        index: offset in `flat`, height and width of each image.
        offsets: the first column of `index`.
        heights: the second.
        widths: the third.
    """

    def __init__(self, flat: torch.Tensor, index: npt.NDArray[np.int64]) -> None:
        self.flat, self.index = flat, index
        self.offsets, self.heights, self.widths = (index[:, i] for i in range(3))

    def __len__(self) -> int:
        return len(self.index)

    def tensor(self, i: int) -> torch.Tensor:
        """Return one image as an H×W×3 view on the device of the pixels; not to be written to."""
        offset, height, width = self.index[i].tolist()
        return self.flat[offset : offset + height * width * 3].view(height, width, 3)

    def gather(self, rows: npt.NDArray[np.int64]) -> Pixels:
        """Return a copy of some images, one after the other."""
        index = self.index[rows]
        ends = np.cumsum(3 * index[:, 1] * index[:, 2])
        index[:, 0] = ends - 3 * index[:, 1] * index[:, 2]
        return Pixels(torch.cat([self.tensor(row).view(-1) for row in rows.tolist()]), index)

    def send(self, device: torch.device) -> Pixels:
        """Return the same images with the pixels on a GPU, without waiting for the copy."""
        flat = self.flat if self.flat.is_pinned() else self.flat.pin_memory()
        return Pixels(flat.to(device, non_blocking=True), self.index)


class PixelCache(Pixels):
    """Images of a catalogue as RGB bytes, all scaled alike.

    Attributes:
        catalog: the images that could be read, in the order of the cache.
        bad: path and reason of those that could not.
        flat: all pixels in one row, uint8; a memory map, or memory of a device after `to`.
        index: offset in `flat`, height and width of each image.
        encoded: whether images are compressed again.
    """

    encoded: ClassVar[bool] = False

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
        super().__init__(flat, index)
        self.catalog, self.bad, self._folder = catalog, bad, folder
        self._use: InUse | None = None

    @classmethod
    def build(
        cls,
        catalog: Catalog,
        size: Size,
        root: str | os.PathLike[str] | None = None,
        *,
        interpolation: Interpolation = "bicubic",
        policy: Literal["error", "skip"] = "error",
        progress: Progress | None = None,
        starting: Callable[[], None] = lambda: None,
        waiting: Callable[[], None] = lambda: None,
    ) -> Self:
        """Open the cache of these images, decoding them first if nobody has.

        The cache is found by what the image files contain, not by where they lie. Processes
        that ask for the same one at once wait for the first, which alone reads the images; one
        that was cut off while writing, or has been damaged since, is made again.

        Args:
            catalog: what to decode.
            size: pixels of the shorter side after scaling, or of height and width.
            root: folder of caches; the user's cache folder unless given.
            interpolation: "bicubic" or "bilinear".
            policy: when images cannot be read, "error" raises an ImageError that names them,
                "skip" leaves them out of `catalog` and lists them in `bad`.
            progress: called with (images done, images in all).
            starting: called before the images are read and decoded.
            waiting: called before waiting for another process that decodes them.
        """
        if policy not in ("error", "skip"):
            raise ValueError(f"policy must be 'error' or 'skip', got {policy!r}")
        _check(catalog, size, interpolation)
        home, states = cache_home(root), _states(catalog)
        known, contents = _remembered(catalog, home, states)

        def store() -> Path:
            return home / _key(contents, size, interpolation, cls.encoded)

        def find() -> Self | None:
            return _open(cls, store(), catalog.subset(_readable(contents))) if contents else None

        def make() -> Self | None:
            folder = store()
            with _locked(home / f"{folder.name}.lock", waiting) as alone:
                found = find()  # from the same images in another place
                if found is None:
                    _clear(folder, alone)
                    files = [catalog.file(row) for row in _readable(contents)]
                    images = decode_all(files, size, interpolation, progress, encoded=cls.encoded)
                    with closing(images):  # however it ends, the decoding processes end too
                        _write(store, _followed(images, catalog, states, contents))
                    found = find()
            return found

        found = find()
        if found is None:
            # Where files are missing nothing is remembered, and who waits would gain nothing.
            turn = _locked(home / f"{known.name}.lock", waiting) if all(states) else nullcontext()
            with turn:
                contents = _remembered(catalog, home, states)[1]
                found = find()  # another process may have built it
                if found is None:
                    starting()
                    contents = _contents(catalog, home, states)
                    found = make()
        if found is None:
            raise OSError(f"{store()} does not hold what was just written to it")
        about = f"{described_size(size)}, {interpolation}{', encoded' if cls.encoded else ''}"
        found._use = note_use(store(), catalog.root, len(catalog), about)
        found.bad = _all_bad(found.bad, catalog, contents)
        refuse_bad(found.bad, len(catalog), policy)
        copies = _copies(catalog, contents)
        if copies:
            found.catalog = replace(found.catalog, notes=(*found.catalog.notes, *copies))
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

    def __getitem__(self, i: int) -> Array:
        """Return one image as a read-only H×W×3 view."""
        view: Array = self.tensor(i).cpu().numpy()
        view.flags.writeable = False
        return view

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
                f"{_free(target) / 2**30:.3f} GiB are free; use data.cache pixels or none, "
                "or a smaller data.short_side"
            ) from error
        return PixelCache(self.catalog, flat, self.index, self.bad)

    def check_size(self) -> None:
        """Raise an OSError if the file was truncated: reading past its end kills the process."""
        if self._folder is None:
            return
        file = self._folder / "pixels.bin"
        with suppress(FileNotFoundError):  # a removed file stays mapped
            size = file.stat().st_size
            if size < len(self.flat):
                raise OSError(
                    f"{file} was truncated to {size} bytes while in use. Run the same command "
                    "again to rebuild it and resume."
                )

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


class EncodedCache(PixelCache):
    """Scaled images that were compressed again, to be decoded when they are asked for.

    It takes about a third of the bytes of the pixels, which differ slightly from those of the
    files. An image is [1, bytes] of `flat`.
    """

    encoded = True

    def members(self) -> tuple[list[str], npt.NDArray[np.int64]]:
        """Return the one file that holds all images, and [file, offset, size] of each."""
        assert self._folder is not None
        zeros = np.zeros_like(self.offsets)
        places = np.stack([zeros, self.offsets, self.widths], axis=1)
        return [str(self._folder / "pixels.bin")], places


def estimate(
    catalog: Catalog,
    size: Size,
    root: str | os.PathLike[str] | None = None,
    *,
    interpolation: Interpolation = "bicubic",
    encoded: bool = False,
) -> tuple[bool, int]:
    """Return whether the cache that `PixelCache.build` would open is there, and its bytes.

    Reads the headers of at most 1 000 images. So a cache that was built from the same images in
    another place is found by `build`, but not here.
    """
    _check(catalog, size, interpolation)
    home = cache_home(root)
    contents = _remembered(catalog, home, _states(catalog))[1]
    if contents:
        file = home / _key(contents, size, interpolation, encoded) / "pixels.bin"
        if file.is_file():
            return True, file.stat().st_size
    total = len(catalog)
    files = [catalog.file(i) for i in range(0, total, -(-total // 1000))]
    sizes = [_scaled_bytes(file, size) for file in files]
    share = _ENCODED_SHARE if encoded else 1
    return False, round(share * sum(sizes) / len(sizes) * total)


def known_contents(catalog: Catalog, root: str | os.PathLike[str] | None = None) -> str | None:
    """Return the digest of all image files, in their order, if `PixelCache.build` remembers it."""
    contents = _remembered(catalog, cache_home(root), _states(catalog))[1]
    return _digest(filter(_is_read, contents)) if contents else None


def check_files(
    catalog: Catalog,
    size: Size,
    root: str | os.PathLike[str] | None = None,
    *,
    interpolation: Interpolation = "bicubic",
    policy: Literal["error", "skip"] = "error",
    progress: Progress | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return path and reason of the images that cannot be read, before they are read on the fly.

    With policy "error" only the headers are looked at, and what is wrong with one is an ImageError.
    With "skip" every image is decoded once, as `PixelCache.build` would, so that it is known which
    ones to leave out. Either is remembered for as long as no file changes.
    """
    _check(catalog, size, interpolation)
    states = _states(catalog)
    facts = (_FORMAT, size, interpolation, metadata.version("pillow"), policy)
    name = _digest([repr(facts).encode(), _states_digest(catalog, states).encode()])
    file = cache_home(root) / "checked" / f"{name}.json"
    try:
        found = [(row, reason) for row, reason in json.loads(file.read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        files = [catalog.file(row) for row in range(len(catalog))]
        errors = list(check_all(files, size, interpolation, policy == "skip", progress))
        found = [(row, error.reason) for row, error in errors]
        if not any(error.passing for _, error in errors):
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file, json.dumps(found).encode())
    bad = tuple((catalog.paths[row], reason) for row, reason in found)
    refuse_bad(bad, len(catalog), policy)
    return bad


def refuse_bad(bad: tuple[tuple[str, str], ...], total: int, policy: str) -> None:
    """Raise an ImageError about images that cannot be read, unless the others are to do."""
    if bad and (policy == "error" or len(bad) == total):
        listed = some([f"{path}: {reason}" for path, reason in bad])
        hint = "; --data.bad-images skip leaves them out" if len(bad) < total else ""
        raise ImageError(f"{len(bad)} of {total} images cannot be read", listed + hint)


def describe_copies(catalog: Catalog) -> list[str]:
    """Say which images are copies of others; reads those alone that are of equal size."""
    files = [catalog.file(row) for row in range(len(catalog))]
    sizes = [_size(file) for file in files]
    count = Counter(sizes)
    rows = [row for row, size in enumerate(sizes) if count[size] > 1]
    with ThreadPoolExecutor(cores()) as pool:
        return _copies(catalog.subset(rows), list(pool.map(_content, [files[row] for row in rows])))


def file_sizes(catalog: Catalog) -> str:
    """Return a digest of the bytes that each image file takes, which copying does not change."""
    sizes = np.array([_size(catalog.file(row)) for row in range(len(catalog))], np.int64)
    return _digest([sizes.tobytes()])


def _size(file: str) -> int:
    name, member = split_shard_path(file)
    try:
        return shard_members(name)[member][1] if member else os.stat(name).st_size
    except (OSError, ValueError, KeyError):  # whoever opens it will say why
        return -1


def _scaled_bytes(file: str, size: Size) -> int:
    try:
        width, height = check_header(file, size)
    except ImageError:
        return 0
    return 3 * width * height


def _check(catalog: Catalog, size: Size, interpolation: str) -> None:
    check_interpolation(interpolation)
    sides = (size,) if isinstance(size, int) else size
    if not 1 <= min(sides) <= max(sides) <= 4096:
        raise ValueError(f"images are scaled to 1 to 4096 pixels, got {described_size(size)}")
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


def _open(kind: type[Cache], folder: Path, catalog: Catalog) -> Cache | None:
    """Return the cache in a folder, or None where there is none or it has been damaged."""
    try:
        header = json.loads((folder / "header.json").read_text(encoding="utf-8"))
        reasons = header.pop("bad")
        if header != {"key": folder.name, **_checksums(folder)}:
            return None
        index = np.load(folder / "index.npy")
        good = index[:, 1] > 0
        bad = zip(catalog.subset(~good).paths, reasons, strict=True)
        return kind(catalog.subset(good), _map(folder), index[good], tuple(bad), folder)
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


def _write(store: Callable[[], Path], images: Iterable[Array | ImageError]) -> None:
    """Write a new store of images, or of the reasons why they could not be decoded.

    Its name is asked for twice, since it follows from which images could be read.
    """
    folder = store()
    part = _part(folder)
    part.mkdir(parents=True)
    try:
        index: list[tuple[int, int, int]] = []
        reasons: list[str] = []
        offset = 0
        # Not forced to the disk, which takes seconds: what a power cut spoils does not have its
        # checksum, and is made again.
        with writing(folder), (part / "pixels.bin").open("wb") as stream:
            for image in images:
                if isinstance(image, ImageError):
                    reasons.append(image.reason)
                    index.append((offset, 0, 0))
                else:
                    stream.write(image.data)
                    index.append((offset, *image.shape[:2]))
                    offset += image.size
        with writing(folder):
            np.save(part / "index.npy", np.array(index, dtype=np.int64).reshape(-1, 3))
        folder = store()
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


def _key(contents: Iterable[Content], size: Size, interpolation: str, encoded: bool) -> str:
    """Digest what the cache depends on: the bytes that were read, and how they are decoded."""
    facts: tuple[Any, ...] = (_FORMAT, size, metadata.version("pillow"), interpolation)
    if encoded:
        facts = (*facts, ENCODED)
    return _digest([repr(facts).encode(), *filter(_is_read, contents)])


def _contents(catalog: Catalog, home: Path, states: list[State]) -> list[Content]:
    """Digest the bytes of every image, which only the first call reads."""
    known, found = _remembered(catalog, home, states)
    if found:
        return found
    # A change in the same tick of the clock as the last one would not show in the states.
    newest = max(max(state[1:3], default=0) for state in states) / 1e9
    time.sleep(min(max(0.0, newest + _TICK - time.time()), _TICK))
    with ThreadPoolExecutor(cores()) as pool:
        found = list(pool.map(_content, [catalog.file(row) for row in range(len(catalog))]))
    if len(_readable(found)) == len(found):
        known.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(known, b"".join(filter(_is_read, found)))
    return found


def _remembered(catalog: Catalog, home: Path, states: list[State]) -> tuple[Path, list[Content]]:
    """Return the file for digests of images in these states, and those in it if it is there."""
    file = home / "contents" / _states_digest(catalog, states)
    with suppress(OSError):
        data = file.read_bytes()
        if len(data) == _DIGEST * len(catalog):
            return file, [data[part] for part in chunks(len(data), _DIGEST)]
    return file, []


def _states_digest(catalog: Catalog, states: list[State]) -> str:
    names = (os.path.abspath(catalog.file(row)) for row in range(len(catalog)))
    lines = (f"{name}\0{state}\0" for name, state in zip(names, states, strict=True))
    return _digest(line.encode(errors="surrogateescape") for line in lines)


def _content(file: str) -> Content:
    try:
        with open_bytes(file) as stream:
            digest = hashlib.file_digest(stream, partial(hashlib.blake2b, digest_size=_DIGEST))
            return digest.digest()
    except ImageError as error:
        return error
    except OSError as error:
        return ImageError(file, f"cannot be read: {error.strerror or error}", passing=True)


def _is_read(content: Content) -> TypeGuard[bytes]:
    return isinstance(content, bytes)


def _readable(contents: list[Content]) -> list[int]:
    return [row for row, content in enumerate(contents) if _is_read(content)]


def _followed(
    images: Iterable[Array | ImageError],
    catalog: Catalog,
    states: list[State],
    contents: list[Content],
) -> Iterator[Array | ImageError]:
    """Give what belongs to the contents; mark in them the files that could not be read after all.

    Files that have changed since their bytes were digested are an error.
    """
    for row, image in zip(_readable(contents), images, strict=True):
        if isinstance(image, ImageError) and image.passing:
            contents[row] = image
        else:
            yield image
    pairs = zip(catalog.paths, states, _states(catalog), strict=True)
    changed = [path for path, before, after in pairs if before != after]
    if changed:
        raise ImageError(
            f"{len(changed)} images changed while they were decoded",
            f"{some(changed)}; try again when nothing writes to them any more",
        )


def _all_bad(
    damaged: Iterable[tuple[str, str]], catalog: Catalog, contents: list[Content]
) -> tuple[tuple[str, str], ...]:
    """Return path and reason of images that are damaged or could not be read, in order."""
    reasons = dict(damaged)
    for path, content in zip(catalog.paths, contents, strict=True):
        if isinstance(content, ImageError):
            reasons[path] = content.reason
    return tuple((path, reasons[path]) for path in catalog.paths if path in reasons)


def _copies(catalog: Catalog, contents: list[Content]) -> list[str]:
    """Say which images are copies of others: of their class, and of another, which is a mistake."""
    first: dict[bytes, tuple[str, int]] = {}
    alike, unlike = list[str](), list[str]()
    codes = catalog.codes.tolist()
    for path, code, content in zip(catalog.paths, codes, contents, strict=True):
        if _is_read(content) and (before := first.setdefault(content, (path, code)))[0] != path:
            (alike if before[1] == code else unlike).append(f"{path} (of {before[0]})")
    notes = []
    if alike:
        many = "images are copies" if len(alike) > 1 else "image is a copy"
        notes.append(f"{len(alike)} {many}, byte for byte: {some(alike)}")
    if unlike:
        many = "images are copies of others" if len(unlike) > 1 else "image is a copy of one"
        notes.append(
            f"{len(unlike)} {many} in another class, byte for byte, so one of the two labels is "
            f"wrong: {some(unlike)}"
        )
    return notes


def _states(catalog: Catalog) -> list[State]:
    @cache  # a tar shard is asked for once, not for each of its members
    def state(file: str) -> State:
        try:
            return file_state(file)
        except OSError:
            return ()

    return [state(split_shard_path(catalog.file(row))[0]) for row in range(len(catalog))]


@contextmanager
def _locked(file: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold a lock that other processes wait for and that a killed process gives back.

    Gives False where the file system has no locks; renaming keeps the store whole even then.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        waiting()
        with suppress(OSError):
            lock.acquire()
    except (OSError, NotImplementedError):
        pass
    try:
        yield lock.is_locked
    finally:
        lock.release()
