"""Align the faces in a folder of images: parallel and resumable."""

import csv
import hashlib
import io
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from proximetry._util.errors import UsageError, some
from proximetry._util.files import atomic_path, atomic_write, written_for
from proximetry._util.machine import cores
from proximetry._util.tensors import chunks
from proximetry._util.types import Progress
from proximetry.data.folders import files_below, is_image
from proximetry.data.images import ImageError, image_size, open_image
from proximetry.faces import Keep, Size
from proximetry.faces.alignment import height_and_width, similarity, template, warp
from proximetry.faces.detector import BATCH, Detector, Faces, find_detector

MAX_WORKERS = 16  # each holds a few images and the activations of the network in memory
REPORT, JOURNAL = "faces.csv", ".align.sqlite"
FORMAT = "proximetry aligned faces 3"
POINTS = ("left_eye", "right_eye", "nose", "left_mouth", "right_mouth")
COLUMNS = (
    *("path", "status", "faces", "kept", "score", "left", "top", "right", "bottom"),
    *(f"{point}_{axis}" for point in POINTS for axis in "xy"),
    *("output", "reason"),
)

Log = Callable[[str], None]


@dataclass(frozen=True)
class Alignment:
    """Summary of an aligned folder; all counts are images except `faces`, the files written."""

    out: Path
    report: Path
    images: int
    faces: int
    several: int
    no_face: int
    unreadable: int


class _Entry(NamedTuple):
    """An image in the journal: status, output files with their sizes, and rows of the report.

    `stamp` is its size in bytes and modification time; another stamp is another image.
    """

    stamp: list[int]
    status: str
    outputs: dict[str, int]
    rows: list[list[Any]]


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
    which lists every image and every detected face.

    Args:
        folder: the images.
        out: the output folder; may contain the output of an earlier call with the same settings.
        size: height and width; the template of 112x96 is the middle of that of 112x112.
        keep: the largest face of an image, the one nearest to its center, or all.
        detector: an SCRFD model with key points; by default that of an installed package.
        progress: called with (images done, images in total).
        log: called with messages.

    Raises:
        UsageError: there is nothing to align (also if all images have the size of an aligned
            face), no detector, or `out` contains other files.
    """
    for name, value, known in (("size", size, get_args(Size)), ("keep", keep, get_args(Keep))):
        if value not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    source, home = Path(folder), Path(out)
    paths = _find_images(source, home, log)
    if _is_aligned(source, paths, size):
        raise UsageError(f"all images in {source} are {size} already. Use them as they are.")
    file, package = (Path(detector), "") if detector is not None else find_detector()
    model = Detector(file)
    log(f"detector: {file.name}{package and f' of {package}'}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    settings = {
        "format": FORMAT,
        "folder": str(source.resolve()),
        "size": size,
        "keep": keep,
        "detector": f"{file.name} ({digest})",
    }
    work = _Work(source, home, size, keep, model, ambiguous(paths, keep))
    with _open_journal(home, settings) as journal:
        done = _check_journal(journal, source, home, paths)
        _run(work, [path for path in paths if path not in done], len(paths), journal, progress)
        return _write_report(journal, home, paths)


def _find_images(folder: Path, out: Path, log: Log) -> list[str]:
    """Return the images below a folder; raise if there are none or `out` lies among them."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    if out.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"{out} lies in {folder}, where the faces would be taken for images. "
            "Choose a folder outside."
        )
    paths, others, skipped = files_below(folder)
    if not paths:
        raise UsageError(f"{folder} contains no images, only {some(others) or 'nothing'}")
    if others:
        log(f"{len(others)} files are not images: {some(others)}")
    if skipped:
        log(f"skipped in {folder}: {some(skipped)}")
    return paths


def _is_aligned(folder: Path, paths: Sequence[str], size: Size) -> bool:
    """Whether all images that can be read have the size of an aligned face."""
    readable = False
    for path in paths:
        try:
            width, height = image_size(folder / path)
        except ImageError:
            continue
        if (height, width) != height_and_width(size):
            return False
        readable = True
    return readable


def ambiguous(paths: Sequence[str], keep: Keep) -> set[str]:
    """Return the images whose faces keep the image's extension in their name: "a.jpg.png".

    These differ from another image in their extension only, or still have an extension without it,
    or look like a second face. So no two outputs have the same name.
    """
    stems = {path: str(PurePosixPath(path).with_suffix("")) for path in paths}
    count = Counter(stems.values())

    def is_free(stem: str) -> bool:
        head, mark, number = stem.rpartition(".face")
        second = keep == "all" and head and mark and number.isdigit()
        return count[stem] == 1 and not second and not is_image(f"_{stem.rpartition('/')[2]}")

    return {path for path, stem in stems.items() if not is_free(stem)}


def output_name(path: str, rank: int, ambiguous: set[str]) -> str:
    """Return the output file of the face of an image with this rank, from 0."""
    stem = path if path in ambiguous else PurePosixPath(path).with_suffix("")
    return f"{stem}{f'.face{rank + 1}' if rank else ''}.png"


def choose(faces: Faces, keep: Keep, shape: Sequence[int]) -> list[int]:
    """Return the rows of the faces of an image [height, width, …] to keep, best first."""
    low, high = faces.boxes[:, :2].astype(np.float64), faces.boxes[:, 2:].astype(np.float64)
    if keep == "center":
        merit = -np.linalg.norm((low + high) / 2 - (shape[1] / 2, shape[0] / 2), axis=1)
    else:
        merit = np.prod(np.maximum(high - low, 0), 1)
    order = [int(row) for row in np.argsort(-merit, kind="stable")]
    return order if keep == "all" else order[:1]


@dataclass(frozen=True)
class _Work:
    """Detect, choose, warp and write the faces of a few images."""

    folder: Path
    out: Path
    size: Size
    keep: Keep
    detector: Detector
    ambiguous: set[str]

    def __call__(self, paths: Sequence[str]) -> dict[str, _Entry]:
        entries: dict[str, _Entry] = {}
        images: dict[str, npt.NDArray[np.uint8]] = {}
        stamps = {path: _stamp(self.folder / path) for path in paths}
        for path in paths:
            try:
                images[path] = np.asarray(open_image(self.folder / path))
            except ImageError as error:
                entries[path] = _without_face(path, stamps[path], "unreadable", error.reason)
        for path, faces in zip(images, self.detector(list(images.values())), strict=True):
            entries[path] = self._align(path, stamps[path], images[path], faces)
        return entries

    def _align(
        self, path: str, stamp: list[int], image: npt.NDArray[np.uint8], faces: Faces
    ) -> _Entry:
        if not len(faces):
            return _without_face(path, stamp, "no face", "")
        # Rounded first: the report has the numbers that the face was warped with.
        scores = faces.scores.astype(np.float64).round(4)
        boxes, points = (of.astype(np.float64).round(2) for of in (faces.boxes, faces.points))
        names = [""] * len(faces)
        outputs: dict[str, int] = {}
        for rank, row in enumerate(choose(faces, self.keep, image.shape)):
            matrix = similarity(points[row], template(self.size))
            if matrix is not None:
                names[row] = output_name(path, rank, self.ambiguous)
                face = warp(image, matrix, *height_and_width(self.size))
                content = io.BytesIO()
                # Higher levels take up to ten times as long and save a tenth at most.
                Image.fromarray(face).save(content, "PNG", compress_level=1)
                self._write(names[row], content.getvalue())
                outputs[names[row]] = len(content.getvalue())
        status, reason = ("aligned", "") if outputs else ("no face", "the five points coincide")
        rows = []
        for name, score, box, five in zip(names, scores, boxes, points, strict=True):
            start = [path, status, len(faces), "yes" if name else "no", score.item()]
            rows.append([*start, *box.tolist(), *five.ravel().tolist(), name, reason])
        return _Entry(stamp, status, outputs, rows)

    def _write(self, name: str, content: bytes) -> None:
        file = self.out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, content, durable=False)


def _without_face(path: str, stamp: list[int], status: str, reason: str) -> _Entry:
    row = [path, status, 0, "no", *[""] * (len(COLUMNS) - 5), reason]
    return _Entry(stamp, status, {}, [row])


def _run(
    work: _Work,
    paths: Sequence[str],
    total: int,
    journal: sqlite3.Connection,
    progress: Progress | None,
) -> None:
    """Process images with all cores, and record each when its faces are written."""
    done = total - len(paths)
    workers = min(cores(), MAX_WORKERS) + 1  # one more, while others wait for the disk
    with ThreadPoolExecutor(workers) as pool:
        # The pool queues all it is given: a few thousand images at a time.
        for group in chunks(len(paths), 256 * workers * BATCH):
            part = paths[group]
            batches = [part[at] for at in chunks(len(part), BATCH)]
            for entries in pool.map(work, batches):
                rows = [(os.fsencode(path), json.dumps(entry)) for path, entry in entries.items()]
                journal.executemany("INSERT OR REPLACE INTO images VALUES (?, ?)", rows)
                journal.commit()
                done += len(entries)
                if progress is not None:
                    progress(done, total)


def _stamp(file: Path) -> list[int]:
    """Return the size in bytes and the modification time of a file, zeros if it is missing."""
    try:
        status = file.stat()
    except OSError:
        return [0, 0]
    return [status.st_size, status.st_mtime_ns]


@contextmanager
def _open_journal(home: Path, settings: dict[str, Any]) -> Iterator[sqlite3.Connection]:
    """Open the journal of a folder that is new, empty, or was written with the same settings."""
    existing = next(path for path in (home, *home.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file. Choose another output folder.")
    names = sorted(path.name for path in home.iterdir()) if existing == home else []
    if names and JOURNAL not in names:
        raise UsageError(
            f"{home} is not empty and was not written by `faces align`: {some(names, 3)}. "
            "Choose another folder."
        )
    home.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(home / JOURNAL, timeout=0)) as journal:
        try:
            journal.execute("PRAGMA locking_mode = EXCLUSIVE")  # until it is closed
            journal.execute("CREATE TABLE IF NOT EXISTS images (path BLOB PRIMARY KEY, entry)")
            row = [b"", json.dumps(settings)]
            journal.execute("INSERT OR IGNORE INTO images VALUES (?, ?)", row)
            journal.commit()
            (text,) = journal.execute("SELECT entry FROM images WHERE path = ?", [b""]).fetchone()
            stored = json.loads(text)
            changed = [key for key, value in settings.items() if stored.get(key) != value]
            if changed:
                changes = ", ".join(f"{k} was {stored.get(k)}, now {settings[k]}" for k in changed)
                raise UsageError(
                    f"{home} was written with other settings: {changes}. Choose another folder, "
                    "or the same settings."
                )
            for leftover in filter(written_for, home.rglob(".*")):
                leftover.unlink(missing_ok=True)
            yield journal
        except sqlite3.Error as error:
            raise ValueError(
                f"{home / JOURNAL}: {error}. Wait for other processes that write to {home}, or "
                "choose another folder."
            ) from error


def _check_journal(
    journal: sqlite3.Connection, folder: Path, home: Path, paths: Sequence[str]
) -> set[str]:
    """Return the images that are done; drop those that changed, failed or lost their faces."""
    query = "SELECT path FROM images WHERE path != ?"
    stored = {os.fsdecode(path) for (path,) in journal.execute(query, [b""])}
    missing = sorted(stored.difference(paths))
    if missing:
        raise UsageError(
            f"{home} has the faces of {len(missing)} images that are no longer in {folder}: "
            f"{some(missing, 3)}. Restore them, or choose another output folder."
        )
    for path in sorted(stored):
        entry = _entry(journal, path)
        sizes = {name: _stamp(home / name)[0] for name in entry.outputs}
        current = entry.stamp == _stamp(folder / path) and sizes == entry.outputs
        if not current or entry.status == "unreadable":
            for output in (home / name for name in entry.outputs):
                if output.resolve().is_relative_to(home.resolve()):
                    output.unlink(missing_ok=True)
            journal.execute("DELETE FROM images WHERE path = ?", [os.fsencode(path)])
            stored.remove(path)
    journal.commit()
    return stored


def _entry(journal: sqlite3.Connection, path: str) -> _Entry:
    query = "SELECT entry FROM images WHERE path = ?"
    (entry,) = journal.execute(query, [os.fsencode(path)]).fetchone()
    return _Entry(*json.loads(entry))


def _write_report(journal: sqlite3.Connection, home: Path, paths: Sequence[str]) -> Alignment:
    """Write the list of all images and faces, and return the counts."""
    count: Counter[str] = Counter()
    with (
        atomic_path(home / REPORT) as report,
        report.open("w", encoding="utf-8", errors="surrogateescape", newline="") as text,
    ):
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        for path in paths:
            entry = _entry(journal, path)
            table.writerows(entry.rows)
            several = len(entry.rows) > 1
            count.update({entry.status: 1, "several": several, "faces": len(entry.outputs)})
    return Alignment(
        out=home,
        report=home / REPORT,
        images=len(paths),
        faces=count["faces"],
        several=count["several"],
        no_face=count["no face"],
        unreadable=count["unreadable"],
    )
