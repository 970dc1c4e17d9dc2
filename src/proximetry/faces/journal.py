"""What a folder of aligned faces says about itself: settings, a journal, the list for people."""

import csv
import json
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proximetry._common import (
    UsageError,
    atomic_path,
    atomic_write,
    read_json,
    some,
    take_lock,
    written_for,
)

SETTINGS, REPORT = "align.json", "faces.csv"
JOURNAL, LOCK = ".align.jsonl", ".align.lock"
FORMAT = "proximetry aligned faces 1"
_LONGEST = 2**20  # bytes of the settings
POINTS = ("left_eye", "right_eye", "nose", "left_mouth", "right_mouth")
COLUMNS = (
    *("path", "status", "faces", "kept", "score", "left", "top", "right", "bottom"),
    *(f"{point}_{axis}" for point in POINTS for axis in "xy"),
    *("output", "reason"),
)


@dataclass(frozen=True)
class Face:
    """A face that was found: what the detector said, and the file of the aligned one if kept."""

    score: float
    box: list[float]
    points: list[list[float]]
    output: str | None = None


@dataclass(frozen=True)
class Picture:
    """What became of a picture.

    Attributes:
        path: the picture.
        stamp: its size and time: another one is another picture.
        status: aligned, no face, unreadable or copied.
        reason: why it is not aligned.
        faces: all that were found.
        outputs: the files that were written, with their checksums.
    """

    path: str
    stamp: list[int]
    status: str
    reason: str = ""
    faces: list[Face] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Alignment:
    """What came of a folder; counts are of pictures but for `faces`, the files written."""

    out: Path
    report: Path
    images: int
    faces: int
    copied: int
    several: int
    no_face: int
    unreadable: int


def stamp_of(file: Path) -> list[int]:
    """Return by what a picture is known to be the same: its size in bytes and its time."""
    try:
        status = file.stat()
    except OSError:  # gone, or behind a link that leads nowhere: unreadable
        return [0, 0]
    return [status.st_size, status.st_mtime_ns]


def checksum_of(content: bytes) -> int:
    """Return by what a file is known to be whole."""
    return zlib.crc32(content)


class Journal:
    """What is done so far: a line of JSON per picture, the last one about it counts.

    The lines stay in the file, and in memory is only where each begins: there may be millions.
    """

    def __init__(self, home: Path) -> None:
        self._home = home
        self._file = (home / JOURNAL).open("a+b")
        self._places: dict[str, int] = {}
        self._lines = 0
        for place, picture in self._read():
            self._places[picture.path] = place
            self._lines += 1
        # What follows is a line that was cut off.
        self._file.truncate(self._file.tell())
        self._file.seek(0, os.SEEK_END)

    def _read(self) -> Iterator[tuple[int, Picture]]:
        """All pictures that were written down, and leave the file at their end."""
        self._file.seek(0)
        place = 0
        for line in iter(self._file.readline, b""):
            picture = _parsed(line)
            if picture is None:
                break
            yield place, picture
            place += len(line)
        self._file.seek(place)

    def _get(self, path: str) -> tuple[Picture, bytes]:
        """A picture, and its line."""
        self._file.seek(self._places[path])
        line = self._file.readline()
        picture = _parsed(line)
        if picture is None:
            raise OSError(f"{self._home / JOURNAL} was changed by somebody else; run it again")
        return picture, line

    def check(
        self, paths: Sequence[str], folder: Path, names: Callable[[str, int], set[str]]
    ) -> None:
        """Refuse to go on if pictures are gone; forget what has changed or is to be tried again.

        `names` tells by a picture and its number of faces which files it becomes: others, once
        there is another picture that differs in its ending alone.
        """
        gone = sorted(self._places.keys() - set(paths))
        if gone:
            raise UsageError(
                f"{self._home} holds the faces of {len(gone)} pictures that are no longer in "
                f"{folder} ({some(gone, 3)}): put them back, or choose another folder to write to"
            )
        for path in list(self._places):
            picture, _ = self._get(path)
            same = picture.stamp == stamp_of(folder / path)
            same &= picture.outputs.keys() <= names(path, len(picture.faces))
            if not same or picture.status == "unreadable" or not self._is_whole(picture):
                del self._places[path]

    def _is_whole(self, picture: Picture) -> bool:
        """Whether all files of a picture are there as they were written."""
        try:
            return all(
                checksum_of((self._home / output).read_bytes()) == checksum
                for output, checksum in picture.outputs.items()
            )
        except OSError:
            return False

    def has(self, path: str) -> bool:
        """Whether a picture is done."""
        return path in self._places

    def add(self, pictures: Sequence[Picture]) -> None:
        """Write down what is done."""
        place = self._file.seek(0, os.SEEK_END)
        for picture in pictures:
            line = json.dumps(picture, default=vars, separators=(",", ":")).encode() + b"\n"
            self._places[picture.path] = place
            self._lines += 1
            place += self._file.write(line)
        self._file.flush()

    def finish(self, paths: Sequence[str]) -> Alignment:
        """Write the list for people, and the journal in the order of the pictures."""
        if hasattr(os, "sync"):
            os.sync()  # the faces are on the disk before the list says that they are there
        if self._lines > len(paths):
            self._remove_outdated()
        count: Counter[str] = Counter()
        with (
            atomic_path(self._home / REPORT) as report,
            report.open("w", encoding="utf-8", errors="surrogateescape", newline="") as text,
            atomic_path(self._home / JOURNAL) as ordered,
            ordered.open("wb") as lines,
        ):
            table = csv.writer(text, lineterminator="\n")
            table.writerow(COLUMNS)
            for path in paths:
                picture, line = self._get(path)
                table.writerows(_rows(picture))
                lines.write(line)
                several = len(picture.faces) > 1
                count.update({picture.status: 1, "several": several, "faces": len(picture.outputs)})
            self.close()  # not every system replaces files that are open
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

    def _remove_outdated(self) -> None:
        """Remove faces of pictures that have changed since and now have others."""
        old = [picture for place, picture in self._read() if place != self._places[picture.path]]
        for picture in old:
            for output in picture.outputs.keys() - self._get(picture.path)[0].outputs.keys():
                (self._home / output).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def open_journal(home: Path, settings: dict[str, Any]) -> Iterator[Journal]:
    """The journal of a folder that is new, empty, or was begun with the same settings."""
    _check_out(home, settings)
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = take_lock(home / LOCK, 0, report=lambda line: None)
    except TimeoutError as owner:
        raise UsageError(
            f"{owner} is writing to {home}; wait for it, or choose another folder"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{home} cannot be written to ({error.strerror}); choose another folder"
        ) from error
    with lock:
        _check_out(home, settings)
        for leftover in filter(written_for, home.rglob(".*")):
            leftover.unlink(missing_ok=True)
        if not (home / SETTINGS).exists():
            atomic_write(home / SETTINGS, json.dumps(settings, indent=2).encode() + b"\n")
        journal = Journal(home)
        try:
            yield journal
        finally:
            journal.close()


def _check_out(home: Path, settings: dict[str, Any]) -> None:
    there = next(path for path in (home, *home.absolute().parents) if path.exists())
    if not there.is_dir():
        raise UsageError(f"{there} is a file; choose another folder to write to")
    if there != home:
        return
    if not (home / SETTINGS).exists():
        names = {path.name for path in home.iterdir() if not written_for(path)} - {LOCK}
        if names:
            raise UsageError(
                f"{home} is not empty and was not written by `faces align` "
                f"({some(sorted(names), 3)}); choose another folder"
            )
        return
    try:
        begun = read_json(home / SETTINGS, _LONGEST)
        changed = [key for key in settings if begun.get(key) != settings[key]]
    except (ValueError, AttributeError):
        raise ValueError(
            f"{home / SETTINGS} is damaged; remove {home}, or choose another folder"
        ) from None
    if changed:
        told = (f"{key} was {_told(begun.get(key))}, now {_told(settings[key])}" for key in changed)
        raise UsageError(
            f"{home} was written with other settings: {', '.join(told)}; "
            "choose another folder, or the same settings"
        )


def _told(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value.get('file')} ({str(value.get('sha256'))[:8]})"
    return "none" if value is None else str(value)


def _parsed(line: bytes) -> Picture | None:
    """A picture from its line, unless that was cut off."""
    if not line.endswith(b"\n"):
        return None
    try:
        values = json.loads(line)
        return Picture(**values | {"faces": [Face(**face) for face in values["faces"]]})
    except (ValueError, TypeError, KeyError):
        return None


def _rows(picture: Picture) -> Iterator[list[Any]]:
    """The rows of the list: one to each face, or one without."""
    begin = [picture.path, picture.status, len(picture.faces)]
    for face in picture.faces:
        numbers = [face.score, *face.box, *(value for point in face.points for value in point)]
        kept = "yes" if face.output else "no"
        yield [*begin, kept, *numbers, face.output, picture.reason]
    if not picture.faces:
        kept = "yes" if picture.outputs else "no"
        blank = [""] * (len(COLUMNS) - 6)
        yield [*begin, kept, *blank, *(picture.outputs or [""]), picture.reason]
