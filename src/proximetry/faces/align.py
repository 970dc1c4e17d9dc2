"""Align the faces in a folder of images: parallel and resumable."""

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

from proximetry._util.errors import Progress, UsageError, some
from proximetry._util.files import atomic_write
from proximetry._util.machine import cores
from proximetry._util.tensors import chunks
from proximetry.data.folders import files_below, is_image
from proximetry.data.images import ImageError, image_size, open_image
from proximetry.faces.alignment import height_and_width, similarity, template, warp
from proximetry.faces.detector import BATCH, Detector, Faces, find_detector
from proximetry.faces.journal import (
    FORMAT,
    AlignedImage,
    Alignment,
    Face,
    Journal,
    open_journal,
    stamp_of,
)
from proximetry.faces.options import Keep, Size

MAX_WORKERS = 16  # each holds a few images and the activations of the network in memory

Log = Callable[[str], None]


def align_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: Size = "112x112",
    keep: Keep = "largest",
    detector: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    log: Log = lambda line: None,
) -> Alignment:
    """Align the faces in all images below a folder; resume an interrupted call.

    The new folder has the same sub-folders with a PNG file for each kept face, and `faces.csv`,
    which lists every image and every detected face. A folder whose images all have the size of an
    aligned face is copied unchanged.

    Args:
        folder: the images.
        out: the output folder; may hold what an earlier call with the same settings wrote.
        size: height and width; the template of 112x96 is the middle of that of 112x112.
        keep: the largest face of an image, the one nearest to its center, or all.
        detector: an SCRFD model with key points; by default that of an installed package.
        progress: called with (images done, images in total).
        log: called with messages.

    Raises:
        UsageError: there is nothing to align, no detector, or `out` holds something else.
    """
    for name, value, known in (("size", size, get_args(Size)), ("keep", keep, get_args(Keep))):
        if value not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    source, home = Path(folder), Path(out)
    paths = _find_images(source, home, log)
    settings: dict[str, Any] = {"format": FORMAT, "folder": str(source.resolve()), "size": size}
    if _is_aligned(source, paths, size):
        log(f"all images in {source} are {size} already: they are copied unchanged")
        settings |= {"keep": None, "detector": None}
        task: _Task = _Copy(source, home, size)
    else:
        file, package = (Path(detector), "") if detector is not None else find_detector()
        model = Detector(file)
        log(f"detector: {file.name}{package and f' of {package}'}")
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        settings |= {"keep": keep, "detector": {"file": file.name, "sha256": content}}
        task = _Align(source, home, size, keep, model, _ambiguous(paths, keep))
    with open_journal(home, settings) as journal:
        journal.check(paths, source, task.names)
        _run(task, paths, journal, progress)
        return journal.write_report(paths)


def _find_images(folder: Path, out: Path, log: Log) -> list[str]:
    """Return the images below a folder; raise if there are none or `out` lies among them."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    inside, outside = folder.resolve(), out.resolve()
    if inside == outside or inside in outside.parents:
        raise UsageError(
            f"{out} lies in {folder}, where the faces would be taken for images. "
            "Choose a folder outside."
        )
    paths, others, skipped = files_below(folder)
    if not paths:
        raise UsageError(f"{folder} holds no images; found {some(others) or 'nothing'}")
    if others:
        log(f"{len(others)} files are not images: {some(others)}")
    if skipped:
        log(f"skipped in {folder}: {some(skipped)}")
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
    """Return the images whose faces keep the image's extension in their name: "a.jpg.png".

    These differ from another image in their extension only, or still have an extension without it,
    or look like a second face. So no two outputs have the same name.
    """
    short = Counter(map(_without_extension, paths))

    def is_free(stem: str) -> bool:
        head, mark, number = stem.rpartition(".face")
        second = keep == "all" and head and mark and number.isdigit()
        return short[stem] == 1 and not second and not is_image(f"_{stem.rpartition('/')[2]}")

    return {path for path in paths if not is_free(_without_extension(path))}


def _without_extension(path: str) -> str:
    return str(PurePosixPath(path).with_suffix(""))


@dataclass(frozen=True)
class _Copy:
    """Copy images that are aligned already, after checking that they can be read."""

    folder: Path
    out: Path
    size: Size

    def __call__(self, paths: Sequence[str]) -> list[AlignedImage]:
        return [self._copy(path) for path in paths]

    def names(self, path: str, faces: int) -> set[str]:
        """Return the output files of an image."""
        return {path}

    def _copy(self, path: str) -> AlignedImage:
        file = self.folder / path
        stamp = stamp_of(file)
        try:
            image = open_image(file)
        except ImageError as error:
            return AlignedImage(path, stamp, "unreadable", error.reason)
        if (image.height, image.width) != height_and_width(self.size):
            reason = f"{image.height}x{image.width} after EXIF rotation, not {self.size}"
            return AlignedImage(path, stamp, "unreadable", reason)
        return AlignedImage(
            path, stamp, "copied", outputs={path: _write(self.out / path, file.read_bytes())}
        )


@dataclass(frozen=True)
class _Align:
    """Detect, choose, warp, write."""

    folder: Path
    out: Path
    size: Size
    keep: Keep
    detector: Detector
    ambiguous: set[str]

    def __call__(self, paths: Sequence[str]) -> list[AlignedImage]:
        stamps = [stamp_of(self.folder / path) for path in paths]
        images: dict[str, npt.NDArray[np.uint8]] = {}
        reasons: dict[str, str] = {}
        for path in paths:
            try:
                images[path] = np.asarray(open_image(self.folder / path))
            except ImageError as error:
                reasons[path] = error.reason
        faces = dict(zip(images, self.detector(list(images.values())), strict=True))
        return [
            self._align(path, stamp, images[path], faces[path])
            if path in images
            else AlignedImage(path, stamp, "unreadable", reasons[path])
            for path, stamp in zip(paths, stamps, strict=True)
        ]

    def _align(
        self, path: str, stamp: list[int], image: npt.NDArray[np.uint8], faces: Faces
    ) -> AlignedImage:
        # Rounded first: the report holds the numbers that the face was warped with.
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
        detected = [
            Face(scores[row].item(), boxes[row].tolist(), points[row].tolist(), names.get(row))
            for row in range(len(faces))
        ]
        if outputs or not detected:
            status = "aligned" if detected else "no face"
            return AlignedImage(path, stamp, status, "", detected, outputs)
        return AlignedImage(path, stamp, "no face", "the five points coincide", detected)

    def names(self, path: str, faces: int) -> set[str]:
        """Return the output files of an image with so many faces."""
        return {self._name(path, rank) for rank in range(faces)}

    def _name(self, path: str, rank: int) -> str:
        stem = path if path in self.ambiguous else _without_extension(path)
        return f"{stem}{f'.face{rank + 1}' if rank else ''}.png"


_Task = _Copy | _Align


def choose(faces: Faces, keep: Keep, shape: Sequence[int]) -> list[int]:
    """Return the rows of the faces of an image [height, width, …] to keep, best first."""
    low, high = faces.boxes[:, :2].astype(np.float64), faces.boxes[:, 2:].astype(np.float64)
    if keep == "center":
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
    """Write a file and return its size."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(file, content, durable=False)
    return len(content)


def _run(task: _Task, paths: Sequence[str], journal: Journal, progress: Progress | None) -> None:
    """Process the images that are not done with all cores, and record them."""
    missing = [path for path in paths if path not in journal]
    done = len(paths) - len(missing)
    workers = min(cores(), MAX_WORKERS) + 1  # one more, while others wait for the disk
    pending: deque[Future[list[AlignedImage]]] = deque()

    def record() -> None:
        nonlocal done
        images = pending.popleft().result()
        journal.add(images)
        done += len(images)
        if progress is not None:
            progress(done, len(paths))

    with ExitStack() as stack:
        pool = ThreadPoolExecutor(workers)
        stack.callback(pool.shutdown, cancel_futures=True)
        for part in chunks(len(missing), BATCH):
            pending.append(pool.submit(task, missing[part]))
            if len(pending) > 2 * workers:
                record()
        while pending:
            record()
