"""Progress of `align_folder`: its settings and which images are done, so that it can resume."""

import csv
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError, some
from proximetry._util.files import (
    atomic_path,
    atomic_write,
    read_json,
    take_lock,
    written_for,
)

SETTINGS, REPORT = "align.json", "faces.csv"
JOURNAL, LOCK = ".align.sqlite", ".align.lock"
FORMAT = "proximetry aligned faces 2"
_MAX_SETTINGS = 2**20  # bytes
POINTS = ("left_eye", "right_eye", "nose", "left_mouth", "right_mouth")
COLUMNS = (
    *("path", "status", "faces", "kept", "score", "left", "top", "right", "bottom"),
    *(f"{point}_{axis}" for point in POINTS for axis in "xy"),
    *("output", "reason"),
)


@dataclass(frozen=True)
class Face:
    """A detected face, and the file of the aligned one if it is kept."""

    score: float
    box: list[float]
    points: list[list[float]]
    output: str | None = None


@dataclass(frozen=True)
class AlignedImage:
    """The outcome for one image.

    Attributes:
        path: the image, relative to the folder.
        stamp: its size in bytes and modification time; a different stamp is a different image.
        status: aligned, no face, unreadable or copied.
        reason: why it is not aligned.
        faces: all detected faces.
        outputs: the files that were written, with their sizes in bytes.
    """

    path: str
    stamp: list[int]
    status: str
    reason: str = ""
    faces: list[Face] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Alignment:
    """Summary of an aligned folder; all counts are images except `faces`, the files written."""

    out: Path
    report: Path
    images: int
    faces: int
    copied: int
    several: int
    no_face: int
    unreadable: int


def stamp_of(file: Path) -> list[int]:
    """Return the size in bytes and the modification time of a file, zeros if it is missing."""
    try:
        status = file.stat()
    except OSError:
        return [0, 0]
    return [status.st_size, status.st_mtime_ns]


class Journal:
    """The images that are done, in an SQLite file: there may be millions."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._database = sqlite3.connect(home / JOURNAL)
        self._database.execute("CREATE TABLE IF NOT EXISTS images (path BLOB PRIMARY KEY, entry)")

    def check(
        self, paths: Sequence[str], folder: Path, names: Callable[[str, int], set[str]]
    ) -> None:
        """Drop images that changed, could not be read or whose faces are missing.

        `names` returns the output files of an image with so many faces. They change when a new
        image differs from it in its extension only.

        Raises:
            UsageError: images in the journal are no longer in the folder.
        """
        stored = [_decode(path) for (path,) in self._database.execute("SELECT path FROM images")]
        missing = sorted(set(stored) - set(paths))
        if missing:
            raise UsageError(
                f"{self._home} holds the faces of {len(missing)} images that are no longer in "
                f"{folder}: {some(missing, 3)}. Restore them, or choose another output folder."
            )
        for path in stored:
            image = self._get(path)
            current = image.stamp == stamp_of(folder / path)
            current &= image.outputs.keys() <= names(path, len(image.faces))
            sizes = {name: stamp_of(self._home / name)[0] for name in image.outputs}
            if not current or image.status == "unreadable" or sizes != image.outputs:
                for name in image.outputs:
                    output = self._home / name
                    if output.resolve().is_relative_to(self._home.resolve()):
                        output.unlink(missing_ok=True)
                self._database.execute("DELETE FROM images WHERE path = ?", [_encode(path)])
        self._database.commit()

    def __contains__(self, path: str) -> bool:
        query = "SELECT 1 FROM images WHERE path = ?"
        return self._database.execute(query, [_encode(path)]).fetchone() is not None

    def add(self, images: Sequence[AlignedImage]) -> None:
        """Record images as done."""
        rows = [(_encode(image.path), json.dumps(asdict(image))) for image in images]
        self._database.executemany("INSERT OR REPLACE INTO images VALUES (?, ?)", rows)
        self._database.commit()

    def _get(self, path: str) -> AlignedImage:
        query = "SELECT entry FROM images WHERE path = ?"
        (entry,) = self._database.execute(query, [_encode(path)]).fetchone()
        values = json.loads(entry)
        return AlignedImage(**values | {"faces": [Face(**face) for face in values["faces"]]})

    def write_report(self, paths: Sequence[str]) -> Alignment:
        """Write the list of all images and faces, and return the counts."""
        count: Counter[str] = Counter()
        with (
            atomic_path(self._home / REPORT) as report,
            report.open("w", encoding="utf-8", errors="surrogateescape", newline="") as text,
        ):
            table = csv.writer(text, lineterminator="\n")
            table.writerow(COLUMNS)
            for path in paths:
                image = self._get(path)
                table.writerows(_rows(image))
                several = len(image.faces) > 1
                count.update({image.status: 1, "several": several, "faces": len(image.outputs)})
        return Alignment(
            out=self._home,
            report=self._home / REPORT,
            images=len(paths),
            faces=count["faces"],
            copied=count["copied"],
            several=count["several"],
            no_face=count["no face"],
            unreadable=count["unreadable"],
        )

    def close(self) -> None:
        """Close the file."""
        self._database.close()


def _encode(path: str) -> bytes:
    """File names need not be valid text."""
    return path.encode(errors="surrogateescape")


def _decode(path: bytes) -> str:
    return path.decode(errors="surrogateescape")


@contextmanager
def open_journal(home: Path, settings: dict[str, Any]) -> Iterator[Journal]:
    """Open the journal of a folder that is new, empty, or was written with the same settings."""
    _check_out(home, settings)
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = take_lock(home / LOCK, 0, report=lambda line: None)
    except TimeoutError as owner:
        raise UsageError(
            f"{owner} is writing to {home}. Wait for it, or choose another folder."
        ) from None
    except OSError as error:
        raise UsageError(
            f"{home} is not writable: {error.strerror}. Choose another folder."
        ) from error
    with lock:
        _check_out(home, settings)
        for leftover in filter(written_for, home.rglob(".*")):
            leftover.unlink(missing_ok=True)
        if not (home / SETTINGS).exists():
            atomic_write(home / SETTINGS, json.dumps(settings, indent=2).encode() + b"\n")
        try:
            with closing(Journal(home)) as journal:
                yield journal
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{home / JOURNAL} is damaged: {error}. Delete {home}, or choose another folder."
            ) from error


def _check_out(home: Path, settings: dict[str, Any]) -> None:
    there = next(path for path in (home, *home.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{there} is a file. Choose another output folder.")
    if there != home:
        return
    if not (home / SETTINGS).exists():
        names = {path.name for path in home.iterdir() if not written_for(path)} - {LOCK}
        if names:
            raise UsageError(
                f"{home} is not empty and was not written by `faces align`: "
                f"{some(sorted(names), 3)}. Choose another folder."
            )
        return
    try:
        stored = read_json(home / SETTINGS, _MAX_SETTINGS)
        changed = [key for key in settings if stored.get(key) != settings[key]]
    except (ValueError, AttributeError):
        raise ValueError(
            f"{home / SETTINGS} is damaged. Delete {home}, or choose another folder."
        ) from None
    if changed:
        pairs = (
            f"{key} was {_show(stored.get(key))}, now {_show(settings[key])}" for key in changed
        )
        raise UsageError(
            f"{home} was written with other settings: {', '.join(pairs)}. "
            "Choose another folder, or the same settings."
        )


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value.get('file')} ({str(value.get('sha256'))[:8]})"
    return "none" if value is None else str(value)


def _rows(image: AlignedImage) -> Iterator[list[Any]]:
    """Yield one row per face, or one row without a face."""
    begin = [image.path, image.status, len(image.faces)]
    for face in image.faces:
        numbers = [face.score, *face.box, *(value for point in face.points for value in point)]
        kept = "yes" if face.output else "no"
        yield [*begin, kept, *numbers, face.output, image.reason]
    if not image.faces:
        kept = "yes" if image.outputs else "no"
        blank = [""] * (len(COLUMNS) - 6)
        yield [*begin, kept, *blank, *(image.outputs or [""]), image.reason]
