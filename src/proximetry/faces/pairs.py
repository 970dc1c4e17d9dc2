"""Pair lists for verification, and the images they name.

LFW's ``pairs.txt``, YTF's ``splits.txt``, and custom CSV lists: image, image, same and optionally
fold. A name is an image or a folder of frames (a video) below one folder.
"""

import csv
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError, some
from proximetry._util.files import read_text
from proximetry.data.datasets.readers import people_folder
from proximetry.data.folders import EXTENSIONS, images_below, is_image
from proximetry.faces import BadImages
from proximetry.metrics import read_pairs

Format = Literal["LFW", "YTF", "CSV"]
FOLDS = 10
_SAME = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class Pair(NamedTuple):
    """A line of a list."""

    line: int
    first: str
    second: str
    same: bool
    fold: str


@dataclass(frozen=True)
class PairProtocol:
    """Pairs of images, their folds and whether they show the same person.

    Attributes:
        source: the list.
        format: "LFW", "YTF" or "CSV".
        pairs: the lines that are compared.
        templates: files by name: one image, or the frames of a video.
        skipped: the lines that are not compared, each with the reason.
    """

    source: str
    format: Format
    pairs: tuple[Pair, ...]
    templates: Mapping[str, tuple[str, ...]]
    skipped: tuple[str, ...] = ()

    @property
    def same(self) -> npt.NDArray[np.bool_]:
        """Whether each pair shows the same person."""
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
        """Remarks for the result."""
        count = len(self.fold_names)
        if count == FOLDS:
            return []
        usual = f"; the protocol of {self.format} has {FOLDS}" if self.format != "CSV" else ""
        return [f"{self.source} has {count} folds{usual}"]

    def without(self, unreadable: Mapping[str, str]) -> "PairProtocol":
        """Remove files, by name with the reason, and the pairs without any file."""
        templates = {
            name: tuple(file for file in files if file not in unreadable)
            for name, files in self.templates.items()
        }
        reasons = {
            name: f"{files[0]}: {unreadable[files[0]]}"
            for name, files in self.templates.items()
            if not templates[name]
        }
        return replace(self, templates=templates)._skip(reasons)

    def _skip(self, reasons: Mapping[str, str]) -> "PairProtocol":
        """Skip the pairs that name one of these; raise if a fold then lacks a kind of pair."""
        pairs = tuple(p for p in self.pairs if p.first not in reasons and p.second not in reasons)
        used = {name for pair in pairs for name in (pair.first, pair.second)}
        templates = {name: files for name, files in self.templates.items() if name in used}
        skipped = (*self.skipped, *_describe_skipped(self.pairs, reasons))
        protocol = replace(self, pairs=pairs, templates=templates, skipped=skipped)
        names = protocol.fold_names
        if len(names) < 2:
            raise ValueError(
                f"{self.source} has {len(names)} folds: the threshold of a fold is chosen on the "
                f"others. Use at least two ({FOLDS} in LFW and YTF)."
            )
        kinds = Counter((pair.fold, pair.same) for pair in pairs)
        for name in names:
            for same, kind in ((True, "the same person"), (False, "different people")):
                if not kinds[name, same]:
                    left = " after skipping images" if skipped else ""
                    raise ValueError(f"{self.source}: fold {name} has no pair of {kind}{left}")
        return protocol


def read_protocol(
    file: str | os.PathLike[str], folder: str | os.PathLike[str], bad_images: BadImages = "error"
) -> PairProtocol:
    """Read a list of pairs and resolve its images below a folder, with any extension.

    Lines with a missing image, or a video without frames, raise one error, or are skipped with
    ``bad_images="skip"``.
    """
    if bad_images not in get_args(BadImages):
        raise UsageError(f"bad_images must be 'error' or 'skip', got {bad_images!r}")
    source, root = Path(file), Path(folder)
    around = people_folder(root)
    if not source.is_file():
        raise UsageError(f"there is no list of pairs {source}")
    text = read_text(source, limit=2**30).removeprefix("\ufeff")
    kind = _recognize(source, text)
    if kind == "LFW":
        table = read_pairs(source)
        named = [f"{name}/{name}_{number:04d}" for name, number in table.images]
        columns = table.lines.tolist(), table.pairs.tolist(), table.same.tolist(), table.folds
        pairs = tuple(
            Pair(line, named[a], named[b], same, str(1 + fold))
            for line, (a, b), same, fold in zip(*columns, strict=True)
        )
    else:
        pairs = tuple(_rows(source, text, kind))
    names = dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second))
    templates, missing = _find_images(root, names)
    if not templates and around != root:
        root = around
        templates, missing = _find_images(root, names)
    if missing and bad_images == "error":
        bad = _describe_skipped(pairs, missing)
        raise ValueError(
            f"{source}: {len(bad)} of {len(pairs)} pairs cannot be compared with the images in "
            f"{root} ({some(bad, 3)}). Skip such pairs with --bad-images skip."
        )
    return PairProtocol(str(source), kind, pairs, templates)._skip(missing)


def _describe_skipped(pairs: Iterable[Pair], reasons: Mapping[str, str]) -> list[str]:
    return [
        f"line {pair.line}: {reason}"
        for pair in pairs
        if (reason := reasons.get(pair.first) or reasons.get(pair.second))
    ]


def _recognize(source: Path, text: str) -> Format:
    """Return the format of a list by its first line."""
    first = next((line for line in text.splitlines() if line.strip()), "")
    if re.fullmatch(r"\s*\d+(\s+\d+)?\s*", first):
        return "LFW"
    fields = len(next(csv.reader([first]), []))
    if fields in (5, 6):
        return "YTF"
    if fields in (3, 4):
        return "CSV"
    raise ValueError(
        f"{source}, line 1: {first[:60]!r} is not a list of pairs. Expected LFW's pairs.txt "
        "('10  300' first), YTF's splits.txt ('split number, pair number, first name, …'), or CSV "
        "with image,image,same or image,image,same,fold."
    )


def _rows(source: Path, text: str, kind: Format) -> list[Pair]:
    """Read YTF's list or CSV; the first line may be a header."""
    pairs: list[Pair] = []
    reader = csv.reader(text.splitlines(), strict=True, skipinitialspace=True)
    try:
        for row in reader:
            fields = [field.strip() for field in row]
            named = fields[:1] if kind == "YTF" else fields[2:3]
            header = named == ["split number"] or [name.lower() for name in named] == ["same"]
            if any(fields) and (pairs or not header):
                pair = _pair(source, reader.line_num, kind, fields)
                if pairs and bool(pair.fold) != bool(pairs[0].fold):
                    raise ValueError(
                        f"{source}, line {pair.line}: expected a fold in every line or in none, "
                        f"got {','.join(fields)!r}"
                    )
                pairs.append(pair)
    except csv.Error as error:
        raise ValueError(f"{source}, line {reader.line_num}: not CSV: {error}") from error
    if not pairs:
        raise ValueError(f"{source} has no pairs")
    if pairs[0].fold:
        return pairs
    # Without folds, distribute both kinds over ten, or fewer if there are too few.
    kinds = Counter(pair.same for pair in pairs)
    count = min(FOLDS, kinds[True], kinds[False]) or 1
    seen: Counter[bool] = Counter()
    for i, pair in enumerate(pairs):
        pairs[i] = pair._replace(fold=str(1 + seen[pair.same] % count))
        seen[pair.same] += 1
    return pairs


def _pair(source: Path, line: int, kind: Format, fields: list[str]) -> Pair:
    """Return the pair of a line.

    YTF's fields are split, pair number, two videos, same; the corrected list appends the corrected
    value.
    """
    if kind == "YTF" and len(fields) in (5, 6) and fields[0].isdecimal():
        first, second, same, fold = fields[2], fields[3], fields[-1], fields[0]
    elif kind == "CSV" and len(fields) in (3, 4):
        first, second, same, fold = (*fields, "")[:4]
    else:
        columns = "split,pair,image,image,same" if kind == "YTF" else "image,image,same[,fold]"
        raise ValueError(f"{source}, line {line}: expected {columns}, got {','.join(fields)!r}")
    if not first or not second or first == second:
        raise ValueError(f"{source}, line {line}: expected two images: {first!r}, {second!r}")
    if same.lower() not in _SAME:
        raise ValueError(f"{source}, line {line}: same is {same!r}. Use one of {', '.join(_SAME)}.")
    return Pair(line, first, second, _SAME[same.lower()], fold)


def _find_images(
    root: Path, names: Iterable[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the files of each name below a folder, and why others are missing."""

    @cache
    def stems(folder: Path) -> dict[str, list[str]]:
        files: dict[str, list[str]] = {}
        for file in sorted(os.listdir(folder)) if folder.is_dir() else ():
            if is_image(file):
                files.setdefault(os.path.splitext(file)[0], []).append(file)
        return files

    templates: dict[str, tuple[str, ...]] = {}
    missing: dict[str, str] = {}
    for name in names:
        path = root / name
        if path.is_file():
            templates[name] = (str(path),)
        elif path.is_dir():
            frames = tuple(str(path / frame) for frame in images_below(path)[0])
            if frames:
                templates[name] = frames
            else:
                missing[name] = f"the video {name} has no frames"
        else:
            stem = path.stem if path.suffix.lower() in EXTENSIONS else path.name
            files = stems(path.parent).get(stem, [])
            if len(files) == 1:
                templates[name] = (str(path.parent / files[0]),)
            else:
                several = f"{name} is ambiguous: {' and '.join(files)}"
                missing[name] = several if files else f"there is no image {name}"
    return templates, missing
