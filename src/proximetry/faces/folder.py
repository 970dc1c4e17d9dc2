"""A folder of pictures made into a folder of aligned faces, by all cores, resumable."""

import hashlib
import io
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from proximetry._common import Progress, UsageError, atomic_write, chunks, cores, some
from proximetry.data.folders import files_below, is_image
from proximetry.data.images import ImageError, image_size, open_image
from proximetry.faces.alignment import height_and_width, similarity, template, warp
from proximetry.faces.detector import BATCH, Detector, Faces, find_detector
from proximetry.faces.journal import (
    FORMAT,
    Alignment,
    Face,
    Journal,
    Picture,
    checksum_of,
    open_journal,
    stamp_of,
)
from proximetry.faces.options import Keep, Size

MOST_WORKERS = 16  # each holds a few pictures and a run of the network in memory

Say = Callable[[str], None]


def align_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: Size = "112x112",
    keep: Keep = "largest",
    detector: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    say: Say = lambda line: None,
) -> Alignment:
    """Align the faces in all pictures below a folder; continue where it was cut off.

    The new folder has the same sub-folders with a PNG file to each kept face, and `faces.csv`,
    which lists every picture and every face found in it. A folder whose images all have the size
    of an aligned face is copied as it is.

    Args:
        folder: where the pictures lie.
        out: where the faces go; may hold what an earlier call with the same settings wrote.
        size: height and width; the template of 112x96 is the middle of that of 112x112.
        keep: the largest face of a picture, the one nearest to its centre, or all.
        detector: an SCRFD model with key points; unless given, that of an installed package.
        progress: called with (pictures done, pictures in all).
        say: called with lines about what is done.

    Raises:
        UsageError: there is nothing to align, no detector, or `out` holds something else.
    """
    for name, value, known in (("size", size, get_args(Size)), ("keep", keep, get_args(Keep))):
        if value not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    source, home = Path(folder), Path(out)
    keep = "centre" if keep == "center" else keep
    paths = _find(source, home, say)
    settings: dict[str, Any] = {"format": FORMAT, "folder": str(source.resolve()), "size": size}
    if _is_aligned(source, paths, size):
        say(f"all images in {source} are {size} already: they are copied as they are")
        settings |= {"keep": None, "detector": None}
        work: _Work = _Copying(source, home, size)
    else:
        file, told = (Path(detector), "") if detector is not None else find_detector()
        model = Detector(file)
        say(f"detector: {file.name}{told and f' of {told}'}")
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        settings |= {"keep": keep, "detector": {"file": file.name, "sha256": content}}
        work = _Aligning(source, home, size, keep, model, _ambiguous(paths, keep))
    with open_journal(home, settings) as journal:
        journal.check(paths, source, work.names)
        _run(work, paths, journal, progress)
        return journal.finish(paths)


# What there is


def _find(folder: Path, out: Path, say: Say) -> list[str]:
    """The images below a folder, with refusals that need no more than the names."""
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}")
    inside, outside = folder.resolve(), out.resolve()
    if inside == outside or inside in outside.parents:
        raise UsageError(
            f"{out} lies in {folder}, where the faces would be taken for pictures; "
            "choose a folder outside"
        )
    paths, others, left_out = files_below(folder)
    if not paths:
        raise UsageError(f"{folder} holds no images; found {some(others) or 'nothing'}")
    if others:
        say(f"{len(others)} files are not images: {some(others)}")
    if left_out:
        say(f"left out in {folder}: {some(left_out)}")
    return paths


def _is_aligned(folder: Path, paths: Sequence[str], size: Size) -> bool:
    """Whether all images that can be read have the size of an aligned face."""
    known = False
    for path in paths:
        try:
            width, height = image_size(folder / path)
        except ImageError:
            continue
        if (height, width) != height_and_width(size):
            return False
        known = True
    return known


def _ambiguous(paths: Sequence[str], keep: Keep) -> set[str]:
    """The pictures whose faces keep the ending of the picture in their name: "a.jpg.png".

    Those that differ from another one in their ending alone, and those that would without it still
    have an ending, or look like a second face: so no two outputs are ever the same.
    """
    short = Counter(map(_without_ending, paths))

    def is_free(stem: str) -> bool:
        head, mark, number = stem.rpartition(".face")
        second = keep == "all" and head and mark and number.isdigit()
        return short[stem] == 1 and not second and not is_image(f"_{stem.rpartition('/')[2]}")

    return {path for path in paths if not is_free(_without_ending(path))}


def _without_ending(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))


# What is done with each picture


@dataclass(frozen=True)
class _Copying:
    """For folders that are aligned: every file as it is, once it has been seen to be whole."""

    folder: Path
    out: Path
    size: Size

    def __call__(self, paths: Sequence[str]) -> list[Picture]:
        return [self._copy(path) for path in paths]

    def names(self, path: str, faces: int) -> set[str]:
        """The files that a picture may become."""
        return {path}

    def _copy(self, path: str) -> Picture:
        file = self.folder / path
        stamp = stamp_of(file)
        try:
            image = open_image(file)
        except ImageError as error:
            return Picture(path, stamp, "unreadable", error.reason)
        if (image.height, image.width) != height_and_width(self.size):
            reason = f"{image.height}x{image.width} once it is turned upright, not {self.size}"
            return Picture(path, stamp, "unreadable", reason)
        checksum = _write(self.out / path, file.read_bytes())
        return Picture(path, stamp, "copied", outputs={path: checksum})


@dataclass(frozen=True)
class _Aligning:
    """Detect, choose, warp, write."""

    folder: Path
    out: Path
    size: Size
    keep: Keep
    detector: Detector
    ambiguous: set[str]

    def __call__(self, paths: Sequence[str]) -> list[Picture]:
        stamps = [stamp_of(self.folder / path) for path in paths]
        images: dict[str, npt.NDArray[np.uint8]] = {}
        reasons: dict[str, str] = {}
        for path in paths:
            try:
                images[path] = np.asarray(open_image(self.folder / path))
            except ImageError as error:
                reasons[path] = error.reason
        found = dict(zip(images, self.detector(list(images.values())), strict=True))
        return [
            self._align(path, stamp, images[path], found[path])
            if path in images
            else Picture(path, stamp, "unreadable", reasons[path])
            for path, stamp in zip(paths, stamps, strict=True)
        ]

    def _align(
        self, path: str, stamp: list[int], image: npt.NDArray[np.uint8], faces: Faces
    ) -> Picture:
        # Rounded first: the numbers in the list are those that the face was cut out by.
        scores, boxes, points = (
            values.astype(np.float64).round(digits)
            for values, digits in ((faces.scores, 4), (faces.boxes, 2), (faces.points, 2))
        )
        ranks = {row: rank for rank, row in enumerate(choose(faces, self.keep, image.shape))}
        names: dict[int, str] = {}
        outputs: dict[str, int] = {}
        for row, rank in ranks.items():
            matrix = similarity(points[row], template(self.size))
            if matrix is not None:
                names[row] = self._name(path, rank)
                face = warp(image, matrix, *height_and_width(self.size))
                outputs[names[row]] = _write(self.out / names[row], _png(face))
        found = [
            Face(scores[row].item(), boxes[row].tolist(), points[row].tolist(), names.get(row))
            for row in range(len(faces))
        ]
        if outputs or not found:
            return Picture(path, stamp, "aligned" if found else "no face", "", found, outputs)
        return Picture(path, stamp, "no face", "the five points lie in one", found)

    def names(self, path: str, faces: int) -> set[str]:
        """The files that a picture with so many faces may become."""
        return {self._name(path, rank) for rank in range(faces)}

    def _name(self, path: str, rank: int) -> str:
        stem = path if path in self.ambiguous else _without_ending(path)
        return f"{stem}{f'.face{rank + 1}' if rank else ''}.png"


_Work = _Copying | _Aligning


def choose(faces: Faces, keep: Keep, shape: Sequence[int]) -> list[int]:
    """Return which faces of an image [height, width, …] are kept, the first first."""
    low, high = faces.boxes[:, :2].astype(np.float64), faces.boxes[:, 2:].astype(np.float64)
    if keep == "centre":
        merit = -np.linalg.norm((low + high) / 2 - (shape[1] / 2, shape[0] / 2), axis=1)
    else:
        merit = np.prod(np.maximum(high - low, 0), 1)
    order = [int(row) for row in np.argsort(-merit, kind="stable")]
    return order if keep == "all" else order[:1]


def _png(face: npt.NDArray[np.uint8]) -> bytes:
    content = io.BytesIO()
    # Higher levels take up to ten times as long and save a tenth at most.
    Image.fromarray(face).save(content, "PNG", compress_level=1)
    return content.getvalue()


def _write(file: Path, content: bytes) -> int:
    """Write a file and return its checksum, by which a power cut is noticed."""
    if not file.parent.is_dir():
        file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, content, durable=False)
    return checksum_of(content)


def _run(work: _Work, paths: Sequence[str], journal: Journal, progress: Progress | None) -> None:
    """Do what is not done yet with all cores, and write down in order what is."""
    # Whole batches, always the same: a picture is never run beside others than the first time.
    parts = [p for p in chunks(len(paths), BATCH) if not all(map(journal.has, paths[p]))]
    done = len(paths) - sum(part.stop - part.start for part in parts)
    workers = min(cores(), MOST_WORKERS) + 1  # one more, for while others wait for the disk
    waiting: deque[Future[list[Picture]]] = deque()

    def settle() -> None:
        nonlocal done
        pictures = waiting.popleft().result()
        journal.add(pictures)
        done += len(pictures)
        if progress is not None:
            progress(done, len(paths))

    with ExitStack() as stack:
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        for part in parts:
            waiting.append(pool.submit(work, paths[part]))
            if len(waiting) > 2 * workers:
                settle()
        while waiting:
            settle()
