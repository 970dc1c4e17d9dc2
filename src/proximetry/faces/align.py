"""Align the faces in a folder of images: parallel and resumable."""

import csv
import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from PIL import Image

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_path, final_name
from proximetry._util.formatting import join_first
from proximetry._util.machine import cores, resolve_device
from proximetry._util.tensors import chunks
from proximetry._util.types import Progress
from proximetry.data.folders import files_below, is_image
from proximetry.data.images import ImageError, image_size, open_image
from proximetry.faces import Keep, Size
from proximetry.faces.detector import Detector, Faces, find_detector
from proximetry.faces.geometry import height_and_width, similarity, template, warp

MAX_WORKERS = 16  # each holds a few images and the activations of the network in memory
REPORT, JOURNAL = "faces.csv", ".align.sqlite"
POINTS = ("left_eye", "right_eye", "nose", "left_mouth", "right_mouth")
COLUMNS = (
    *("path", "status", "faces", "kept", "score", "left", "top", "right", "bottom"),
    *(f"{point}_{axis}" for point in POINTS for axis in "xy"),
    *("output", "reason"),
)
STATUS, OUTPUT = COLUMNS.index("status"), COLUMNS.index("output")

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


def align_folder(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: Size = "112x112",
    keep: Keep = "largest",
    detector: str | os.PathLike[str] | None = None,
    device: str | None = None,
    progress: Progress | None = None,
    log: Log = lambda line: None,
) -> Alignment:
    """Align the faces in all images below a folder; resume an interrupted call.

    The output folder has the same subfolders, a PNG file for each kept face, and `faces.csv`, which
    lists every image and every detected face.

    Args:
        folder: the images.
        out: the output folder; may contain the output of an earlier call with the same settings.
        size: height and width; the 112x96 template is the center of the 112x112 template.
        keep: the largest face of an image, the one nearest to its center, or all.
        detector: an SCRFD model with key points; by default that of an installed package.
        device: of the detector; by default a GPU if there is one and onnxruntime-gpu is installed.
        progress: called with (images done, images in total).
        log: called with messages.

    Raises:
        UsageError: if there is nothing to align, all images already have the size of an aligned
            face, there is no detector, or `out` contains other files.
    """
    for name, value, choices in (("size", size, get_args(Size)), ("keep", keep, get_args(Keep))):
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    source, out_folder = Path(folder), Path(out)
    paths = _find_images(source, out_folder, log)
    if _is_aligned(source, paths, size):
        raise UsageError(f"all images in {source} are already {size}. Use them without aligning.")
    file, package = (Path(detector), "") if detector is not None else find_detector()
    model = Detector(file, device)
    where = " on the GPU" if model.on_gpu else ""
    if not model.on_gpu and resolve_device(device).type == "cuda":
        where = " on the CPU; install onnxruntime-gpu to use the GPU"
    log(f"detector: {file.name}{package and f' of {package}'}{where}")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    settings = {"folder": str(source.resolve()), "size": size, "keep": keep}
    settings["detector"] = f"{file.name} ({digest})"
    ambiguous = ambiguous_paths(paths, keep)
    align = partial(_align_images, source, out_folder, model, size, keep, ambiguous)
    workers = min(cores(), MAX_WORKERS) + 1  # one more, since some wait for the disk
    with _open_journal(out_folder, settings) as journal, ThreadPoolExecutor(workers) as pool:
        finished = _finished_images(journal, source, out_folder, paths)
        remaining, done = [path for path in paths if path not in finished], len(finished)
        # The pool queues all its tasks, so it gets a few thousand images at a time.
        batch = model.batch_size
        for group in chunks(len(remaining), 256 * workers * batch):
            part = remaining[group]
            for records in pool.map(align, [part[at] for at in chunks(len(part), batch)]):
                journal.executemany("INSERT OR REPLACE INTO aligned VALUES (?, ?, ?)", records)
                journal.commit()
                done += len(records)
                if progress is not None:
                    progress(done, len(paths))
        return _write_report(journal, out_folder, paths)


def _find_images(folder: Path, out: Path, log: Log) -> list[str]:
    """Return the images below a folder; raise if there are none or `out` lies among them."""
    if not folder.is_dir():
        raise UsageError(f"not a folder: {folder}. Pass a folder of images.")
    if out.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"the output folder is inside the folder of images: {out}. Choose a folder outside "
            f"{folder}."
        )
    paths, others, skipped = files_below(folder)
    if not paths:
        contents = f"only {join_first(others)}" if others else "it is empty"
        raise UsageError(f"no images in {folder}: {contents}. Pass a folder of images.")
    if others:
        log(f"{len(others)} files are not images: {join_first(others)}")
    if skipped:
        log(f"skipped in {folder}: {join_first(skipped)}")
    return paths


def _is_aligned(folder: Path, paths: Sequence[str], size: Size) -> bool:
    """Return whether all readable images have the size of an aligned face."""
    sizes = set[tuple[int, int]]()
    for path in paths:
        with suppress(ImageError):
            sizes.add(image_size(folder / path))
        if sizes - {height_and_width(size)[::-1]}:
            return False
    return bool(sizes)


def ambiguous_paths(paths: Sequence[str], keep: Keep) -> set[str]:
    """Return the images whose outputs keep the extension of the image: "a.jpg.png".

    Without it, two outputs could have the same name: the image differs from another one only in its
    extension, has a second extension, or is named like a second face.
    """
    stems = {path: str(PurePosixPath(path).with_suffix("")) for path in paths}
    count = Counter(stems.values())

    def is_free(stem: str) -> bool:
        head, mark, number = stem.rpartition(".face")
        is_second_face = keep == "all" and head and mark and number.isdigit()
        has_extension = is_image(f"_{stem.rpartition('/')[2]}")
        return count[stem] == 1 and not is_second_face and not has_extension

    return {path for path, stem in stems.items() if not is_free(stem)}


def output_name(path: str, rank: int, ambiguous: set[str]) -> str:
    """Return the output file of the face of an image with this rank, from 0."""
    stem = path if path in ambiguous else PurePosixPath(path).with_suffix("")
    return f"{stem}{f'.face{rank + 1}' if rank else ''}.png"


def choose_faces(faces: Faces, keep: Keep, shape: Sequence[int]) -> list[int]:
    """Return the rows of the faces of an image [height, width, …] to keep, best first."""
    low, high = faces.boxes[:, :2].astype(np.float64), faces.boxes[:, 2:].astype(np.float64)
    if keep == "center":
        merit = -np.linalg.norm((low + high) / 2 - (shape[1] / 2, shape[0] / 2), axis=1)
    else:
        merit = np.prod(np.maximum(high - low, 0), 1)
    order = [int(row) for row in np.argsort(-merit, kind="stable")]
    return order if keep == "all" else order[:1]


def _align_images(
    folder: Path,
    out: Path,
    detector: Detector,
    size: Size,
    keep: Keep,
    ambiguous: set[str],
    paths: Sequence[str],
) -> list[tuple[bytes, str, str]]:
    """Write the faces of a few images; return their paths, stamps and rows of the report."""
    # Stamps first, so that an image that changes meanwhile is aligned again next time.
    stamps = [_stamp(folder / path) for path in paths]
    images, rows = dict[str, npt.NDArray[np.uint8]](), dict[str, list[list[Any]]]()
    for path in paths:
        try:
            images[path] = np.asarray(open_image(folder / path))
        except ImageError as error:
            rows[path] = [_without_face(path, "unreadable", error.reason)]
    for (path, image), faces in zip(images.items(), detector(list(images.values())), strict=True):
        outputs = [""] * len(faces)
        # Rounded first, so that the report contains the values used for warping.
        scores = faces.scores.astype(np.float64).round(4)
        boxes, points = (array.astype(np.float64).round(2) for array in (faces.boxes, faces.points))
        for rank, row in enumerate(choose_faces(faces, keep, image.shape)):
            matrix = similarity(points[row], template(size))
            if matrix is not None:
                outputs[row] = output_name(path, rank, ambiguous)
                (out / outputs[row]).parent.mkdir(parents=True, exist_ok=True)
                face = Image.fromarray(warp(image, matrix, *height_and_width(size)))
                with atomic_path(out / outputs[row], durable=False) as file:
                    # Higher levels take up to ten times as long and save at most a tenth.
                    face.save(file, "PNG", compress_level=1)
        status, reason = "aligned", ""
        if not any(outputs):
            status, reason = "no face", "the five points coincide" if len(faces) else ""
        rows[path] = [] if len(faces) else [_without_face(path, status, reason)]
        for output, score, box, key_points in zip(outputs, scores, boxes, points, strict=True):
            start = [path, status, len(faces), "yes" if output else "no", score.item()]
            rows[path].append([*start, *box.tolist(), *key_points.ravel().tolist(), output, reason])
    return [
        (os.fsencode(path), stamp, json.dumps(rows[path]))
        for path, stamp in zip(paths, stamps, strict=True)
    ]


def _without_face(path: str, status: str, reason: str) -> list[Any]:
    return [path, status, 0, "no", *[""] * (len(COLUMNS) - 5), reason]


def _stamp(file: Path) -> str:
    """Return the size in bytes and the modification time of a file; "" if it is missing."""
    try:
        status = file.stat()
    except OSError:
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"


@contextmanager
def _open_journal(out_folder: Path, settings: dict[str, str]) -> Iterator[sqlite3.Connection]:
    """Open the journal of a folder that is new, empty, or was written with the same settings."""
    existing = next(path for path in (out_folder, *out_folder.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UsageError(f"{existing} is a file. Choose another output folder.")
    names = sorted(path.name for path in out_folder.iterdir()) if existing == out_folder else []
    if names and JOURNAL not in names:
        raise UsageError(
            f"{out_folder} is not empty and was not written by `faces align`: "
            f"{join_first(names, 3)}. Choose another folder."
        )
    out_folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(out_folder / JOURNAL, timeout=0)) as journal:
        try:
            journal.execute("PRAGMA locking_mode = EXCLUSIVE")  # until it is closed
            journal.execute("CREATE TABLE IF NOT EXISTS settings (name PRIMARY KEY, value)")
            journal.execute(
                "CREATE TABLE IF NOT EXISTS aligned (path BLOB PRIMARY KEY, stamp, rows)"
            )
            journal.executemany("INSERT OR IGNORE INTO settings VALUES (?, ?)", settings.items())
            journal.commit()
            changes = [
                f"{name} was {value}, now {settings[name]}"
                for name, value in journal.execute("SELECT name, value FROM settings")
                if value != settings[name]
            ]
            if changes:
                raise UsageError(
                    f"{out_folder} was written with other settings: {', '.join(changes)}. Choose "
                    "another folder, or the same settings."
                )
            for leftover in filter(final_name, out_folder.rglob(".*")):
                leftover.unlink(missing_ok=True)
            yield journal
        except sqlite3.Error as error:
            raise ValueError(
                f"{out_folder / JOURNAL}: {error}. Wait for other processes that write to "
                f"{out_folder}, or choose another folder."
            ) from error


def _finished_images(
    journal: sqlite3.Connection, folder: Path, out_folder: Path, paths: Sequence[str]
) -> set[str]:
    """Return the finished images; remove the outputs of changed or incomplete ones."""
    finished, stale = set[str](), dict[str, list[Path]]()
    for name, stamp, rows in journal.execute("SELECT path, stamp, rows FROM aligned"):
        path, (first, *others) = os.fsdecode(name), json.loads(rows)
        outputs = [out_folder / row[OUTPUT] for row in (first, *others) if row[OUTPUT]]
        # A power failure may leave empty files.
        complete = all(output.is_file() and output.stat().st_size for output in outputs)
        if complete and first[STATUS] != "unreadable" and stamp == _stamp(folder / path):
            finished.add(path)
        else:
            stale[path] = outputs
    if missing := sorted((finished | stale.keys()).difference(paths)):
        raise UsageError(
            f"{out_folder} has faces of {len(missing)} images that are no longer in {folder}: "
            f"{join_first(missing, 3)}. Restore them, or choose another output folder."
        )
    for path, outputs in stale.items():
        for output in outputs:
            output.unlink(missing_ok=True)
        journal.execute("DELETE FROM aligned WHERE path = ?", [os.fsencode(path)])
    journal.commit()
    return finished


def _write_report(journal: sqlite3.Connection, out_folder: Path, paths: Sequence[str]) -> Alignment:
    """Write the list of all images and faces; return the summary."""
    count: Counter[str] = Counter()
    with (
        atomic_path(out_folder / REPORT) as report,
        report.open("w", encoding="utf-8", errors="surrogateescape", newline="") as text,
    ):
        table = csv.writer(text, lineterminator="\n")
        table.writerow(COLUMNS)
        for path in paths:
            query = "SELECT rows FROM aligned WHERE path = ?"
            rows = json.loads(journal.execute(query, [os.fsencode(path)]).fetchone()[0])
            table.writerows(rows)
            n_faces = sum(bool(row[OUTPUT]) for row in rows)
            count.update({rows[0][STATUS]: 1, "several": len(rows) > 1, "faces": n_faces})
    return Alignment(
        out=out_folder,
        report=out_folder / REPORT,
        images=len(paths),
        faces=count["faces"],
        several=count["several"],
        no_face=count["no face"],
        unreadable=count["unreadable"],
    )
