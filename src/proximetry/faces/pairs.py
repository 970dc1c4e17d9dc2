"""Lists of pairs for verification, and the images they name.

LFW's ``pairs.txt``, YTF's ``splits.txt``, and lists of one's own as CSV: image, image, same and, if
wanted, fold. What a line names is an image or a folder of frames (a video), below one folder.
"""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError, some
from proximetry._util.files import read_text
from proximetry.data.datasets.faces import people_folder
from proximetry.data.folders import EXTENSIONS, images_below, is_image
from proximetry.faces.options import BadImages
from proximetry.metrics import read_pairs

Format = Literal["LFW", "YTF", "CSV"]
FOLDS = 10
_LONGEST = 2**30  # bytes of a list
_TRUTH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class Pair(NamedTuple):
    """A line of a list."""

    line: int
    first: str
    second: str
    same: bool
    fold: str


@dataclass(frozen=True)
class PairProtocol:
    """Which images are compared, in which fold, and the truth.

    Attributes:
        source: the list.
        format: "LFW", "YTF" or "CSV".
        pairs: the lines that are compared.
        templates: by name the files of each side of a pair: one, or the frames of a video.
        skipped: the lines that are not compared, each with the reason.
    """

    source: str
    format: Format
    pairs: tuple[Pair, ...]
    templates: Mapping[str, tuple[str, ...]]
    skipped: tuple[str, ...] = ()

    @property
    def same(self) -> npt.NDArray[np.bool_]:
        """The truth of each pair."""
        return np.array([pair.same for pair in self.pairs])

    @property
    def folds(self) -> list[str]:
        """The fold of each pair."""
        return [pair.fold for pair in self.pairs]

    @property
    def fold_names(self) -> list[str]:
        """The folds in the order of the list."""
        return list(dict.fromkeys(self.folds))

    @property
    def notes(self) -> list[str]:
        """What a reader of the result has to know."""
        count = len(self.fold_names)
        if count == FOLDS:
            return []
        usual = f"; the protocol of {self.format} has {FOLDS}" if self.format != "CSV" else ""
        return [f"{self.source} has {count} folds{usual}"]

    def without(self, unreadable: Mapping[str, str]) -> "PairProtocol":
        """Leave files out, by name with the reason, and the pairs that have none left."""
        if not unreadable:
            return self
        left, why = {}, {}
        for name, files in self.templates.items():
            left[name] = tuple(file for file in files if file not in unreadable)
            if not left[name]:
                why[name] = f"{files[0]}: {unreadable[files[0]]}"
        found = _without(self, why)
        return replace(found, templates={name: left[name] for name in found.templates})


def read_protocol(
    file: str | os.PathLike[str], folder: str | os.PathLike[str], bad_images: BadImages = "error"
) -> PairProtocol:
    """Read a list of pairs and find its images below a folder, whatever their extension.

    Lines that name a missing image, or a video without frames, are refused together, or
    ``bad_images="skip"`` leaves them out.
    """
    if bad_images not in get_args(BadImages):
        raise UsageError(f"bad_images must be 'error' or 'skip', got {bad_images!r}")
    source, root = Path(file), Path(folder)
    around = people_folder(root)
    if not source.is_file():
        raise UsageError(f"there is no list of pairs {source}")
    text = read_text(source, _LONGEST).removeprefix("\ufeff")
    form = _recognize(source, text)
    pairs = tuple(_READERS[form](source, text))
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second)))
    templates, why = _Images(root).find_all(names)
    if not templates and around != root:
        root = around
        templates, why = _Images(root).find_all(names)
    protocol = PairProtocol(str(source), form, pairs, templates)
    if why and bad_images == "error":
        bad = _skips(protocol.pairs, why)
        raise ValueError(
            f"{source}: {len(bad)} of {len(pairs)} pairs cannot be compared with the images in "
            f"{root} ({some(bad, 3)}); --bad-images skip leaves such pairs out"
        )
    return _without(protocol, why)


def check_folds(protocol: PairProtocol) -> None:
    """Refuse folds that a threshold cannot be chosen for, or evaluated on."""
    after = " that are left" if protocol.skipped else ""
    names = protocol.fold_names
    if len(names) < 2:
        raise ValueError(
            f"{protocol.source} has {len(names)} folds{after}: the threshold of a fold is chosen "
            f"on the others, so at least two are needed ({FOLDS} in LFW and YTF)"
        )
    kinds = Counter((pair.fold, pair.same) for pair in protocol.pairs)
    for name in names:
        for same, what in ((True, "the same person"), (False, "different people")):
            if not kinds[name, same]:
                raise ValueError(
                    f"{protocol.source}: of the pairs{after}, none in fold {name} is of {what}; "
                    "every fold needs both kinds"
                )


def _without(protocol: PairProtocol, why: Mapping[str, str]) -> PairProtocol:
    """Leave out the pairs that name one of these."""
    kept = tuple(p for p in protocol.pairs if p.first not in why and p.second not in why)
    used = {name for pair in kept for name in (pair.first, pair.second)}
    found = replace(
        protocol,
        pairs=kept,
        templates={name: files for name, files in protocol.templates.items() if name in used},
        skipped=(*protocol.skipped, *_skips(protocol.pairs, why)),
    )
    check_folds(found)
    return found


def _skips(pairs: Iterable[Pair], why: Mapping[str, str]) -> list[str]:
    return [
        f"line {pair.line}: {reason}"
        for pair in pairs
        if (reason := why.get(pair.first) or why.get(pair.second))
    ]


def _recognize(source: Path, text: str) -> Format:
    """Tell the format by the first line."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    if re.fullmatch(r"\s*\d+(\s+\d+)?\s*", first):
        return "LFW"
    fields = len(next(csv.reader([first]), []))
    if fields in (5, 6):
        return "YTF"
    if fields in (3, 4):
        return "CSV"
    raise ValueError(
        f"{source}, line 1: {first[:60]!r} begins no list of pairs; expected LFW's pairs.txt "
        "('10  300' first), YTF's splits.txt ('split number, pair number, first name, …'), or CSV "
        "with image,image,same or image,image,same,fold"
    )


def _lfw(source: Path, text: str) -> Iterable[Pair]:
    found = read_pairs(source)
    names = [f"{name}/{name}_{number:04d}" for name, number in found.images]
    for line, (a, b), same, fold in zip(
        found.lines.tolist(), found.pairs.tolist(), found.same.tolist(), found.folds, strict=True
    ):
        yield Pair(line, names[a], names[b], same, str(1 + fold))


def _ytf(source: Path, text: str) -> Iterable[Pair]:
    """Split, number, two videos, the truth; in the corrected list the corrected truth comes last.

    The first line is a header.
    """
    for number, line in enumerate(text.splitlines(), start=1):
        fields = [field.strip() for field in line.split(",")]
        if not line.strip() or (number == 1 and not fields[0].isdecimal()):
            continue
        if len(fields) not in (5, 6) or not fields[0].isdecimal():
            raise ValueError(
                f"{source}, line {number}: expected 'split number, pair number, first name, second "
                f"name, is same', got {line!r}"
            )
        yield _pair(source, number, fields[2], fields[3], fields[-1], fields[0])


def _csv(source: Path, text: str) -> Iterable[Pair]:
    pairs: list[Pair] = []
    try:
        reader = csv.reader(text.splitlines(), strict=True)
        for fields in reader:
            fields = [field.strip() for field in fields]
            header = not pairs and len(fields) > 2 and fields[2].lower() == "same"
            if not any(fields) or header:
                continue
            number = reader.line_num
            if len(fields) not in (3, 4) or (pairs and len(fields) != 3 + bool(pairs[0].fold)):
                raise ValueError(
                    f"{source}, line {number}: expected image,image,same or, in every line, "
                    f"image,image,same,fold; got {','.join(fields)!r}"
                )
            if len(fields) == 4 and not fields[3]:
                raise ValueError(f"{source}, line {number}: the fold is empty")
            first, second, same, *fold = fields
            pairs.append(_pair(source, number, first, second, same, "".join(fold)))
    except csv.Error as error:
        raise ValueError(f"{source}, line {reader.line_num}: not CSV: {error}") from error
    if not pairs:
        raise ValueError(f"{source} has no pairs")
    return pairs if pairs[0].fold else _divide(pairs)


def _divide(pairs: list[Pair]) -> list[Pair]:
    """Deal pairs without folds out to ten, or fewer if there are too few of a kind."""
    kinds = Counter(pair.same for pair in pairs)
    count = min(FOLDS, kinds[True], kinds[False]) or 1
    seen: Counter[bool] = Counter()
    dealt = []
    for pair in pairs:
        dealt.append(pair._replace(fold=str(1 + seen[pair.same] % count)))
        seen[pair.same] += 1
    return dealt


_READERS = {"LFW": _lfw, "YTF": _ytf, "CSV": _csv}


def _pair(source: Path, line: int, first: str, second: str, same: str, fold: str) -> Pair:
    if not first or not second:
        raise ValueError(f"{source}, line {line}: an image without a name")
    if same.lower() not in _TRUTH:
        raise ValueError(
            f"{source}, line {line}: {same!r} says neither same (1, true, yes) nor different "
            "(0, false, no)"
        )
    if first == second:
        raise ValueError(f"{source}, line {line}: compares {first} with itself")
    return Pair(line, first, second, _TRUTH[same.lower()], fold)


class _Images:
    """The images below a folder by name, whatever their extension."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._listed: dict[Path, dict[str, list[str]]] = {}

    def find_all(self, names: Iterable[str]) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
        """Return the files of each name, and why those of others cannot be found."""
        found: dict[str, tuple[str, ...]] = {}
        why: dict[str, str] = {}
        for name in names:
            try:
                found[name] = self._find(name)
            except ValueError as error:
                why[name] = str(error)
        return found, why

    def _find(self, name: str) -> tuple[str, ...]:
        """Return the image of this name, or the frames of the folder of this name."""
        path = self._root / name
        if path.is_file():
            return (str(path),)
        if path.is_dir():
            frames = tuple(str(path / frame) for frame in images_below(path)[0])
            if not frames:
                raise ValueError(f"the video {name} has no frames")
            return frames
        stem = path.stem if path.suffix.lower() in EXTENSIONS else path.name
        found = self._stems(path.parent).get(stem, [])
        if len(found) != 1:
            there = f"{name} is there as {' and '.join(found)}"
            raise ValueError(there if found else f"there is no image {name}")
        return (str(path.parent / found[0]),)

    def _stems(self, folder: Path) -> dict[str, list[str]]:
        if folder not in self._listed:
            names: dict[str, list[str]] = {}
            for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
                if is_image(name):
                    names.setdefault(os.path.splitext(name)[0], []).append(name)
            self._listed[folder] = names
        return self._listed[folder]
