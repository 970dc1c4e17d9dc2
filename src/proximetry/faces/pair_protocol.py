"""Pair lists for verification, and the images they name.

LFW's ``pairs.txt``, YTF's ``splits.txt``, and custom CSV lists: image, image, same and optionally
fold. A name is an image or a folder of frames (a video) below one folder. InsightFace's ``.bin``
verification sets contain both pairs and images.
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

from proximetry._util.errors import UsageError
from proximetry._util.files import read_text
from proximetry._util.formatting import join_first
from proximetry.data.datasets.readers import people_folder
from proximetry.data.folders import EXTENSIONS, SEPARATOR, images_below, is_image
from proximetry.data.image_pairs import read_image_pairs
from proximetry.faces import BadImages
from proximetry.metrics import read_pairs

Format = Literal["LFW", "YTF", "CSV", "BIN"]
FOLDS = 10
_SAME = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


class Pair(NamedTuple):
    """A line of a pair list."""

    line: int
    first: str
    second: str
    same: bool
    fold: str


@dataclass(frozen=True)
class PairProtocol:
    """Pairs of images with their folds, and whether they show the same person.

    Attributes:
        source: the file of the pair list.
        format: "LFW", "YTF", "CSV" or "BIN".
        pairs: the pairs to compare.
        templates: files by name: one image, or the frames of a video.
        skipped: the skipped lines, each with the reason.
        notes: notes for the result.
    """

    source: str
    format: Format
    pairs: tuple[Pair, ...]
    templates: Mapping[str, tuple[str, ...]]
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The format, or the name of a verification set."""
        return Path(self.source).name if self.format == "BIN" else self.format

    @property
    def folds(self) -> list[str]:
        """The fold of each pair."""
        return [pair.fold for pair in self.pairs]

    @property
    def fold_names(self) -> list[str]:
        """The folds in the order of the list."""
        return list(dict.fromkeys(self.folds))

    def without(self, unreadable: Mapping[str, str]) -> "PairProtocol":
        """Return a protocol without unreadable files, and without pairs that have no file left."""
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
        """Skip the pairs of these files; raise if a fold then lacks same or different pairs."""
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
                    when = " after skipping images" if skipped else ""
                    raise ValueError(f"{self.source}: fold {name} has no pair of {kind}{when}")
        return protocol


def read_protocol(
    file: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None = None,
    bad_images: BadImages = "error",
    *,
    corrected_labels: bool = False,
) -> PairProtocol:
    """Read a pair list and find its images below a folder, with any extension.

    A ``.bin`` verification set needs no folder. With ``bad_images="skip"``, lines with a missing
    image or a video without frames are skipped; by default they raise one ValueError.
    ``corrected_labels`` uses the corrections in the sixth column of YTF's list.
    """
    if bad_images not in get_args(BadImages):
        raise UsageError(f"bad_images must be 'error' or 'skip', got {bad_images!r}")
    source = Path(file)
    if folder is not None:
        root = Path(folder)
        inner = people_folder(root)
    if not source.is_file():
        raise UsageError(f"no such list of pairs: {source}. Pass LFW's pairs.txt, or CSV.")
    if folder is None:
        _label_notes(source, "", "BIN", corrected_labels)
        return _read_set(source)
    text = read_text(source, limit=2**30).removeprefix("\ufeff")
    kind = _recognize(source, text)
    notes = _label_notes(source, text, kind, corrected_labels)
    if kind == "LFW":
        table = read_pairs(source)
        names = [f"{name}/{name}_{number:04d}" for name, number in table.images]
        columns = table.lines.tolist(), table.pairs.tolist(), table.same.tolist(), table.folds
        pairs = tuple(
            Pair(line, names[a], names[b], same, str(1 + fold))
            for line, (a, b), same, fold in zip(*columns, strict=True)
        )
    else:
        pairs = tuple(_read_rows(source, text, kind, corrected_labels))
    files = dict.fromkeys(name for pair in pairs for name in (pair.first, pair.second))
    templates, missing = _find_images(root, files)
    if not templates:
        root = inner
        templates, missing = _find_images(root, files)
    if missing and bad_images == "error":
        reasons = _describe_skipped(pairs, missing)
        raise ValueError(
            f"{source}: {len(reasons)} of {len(pairs)} pairs cannot be compared with the images in "
            f"{root} ({join_first(reasons, 3)}). Skip such pairs with --bad-images skip."
        )
    return PairProtocol(str(source), kind, pairs, templates, notes=notes)._skip(missing)


def _read_set(source: Path) -> PairProtocol:
    """Read a ``.bin`` verification set; its folds are ten blocks of consecutive pairs."""
    if source.suffix != ".bin":
        raise UsageError(f"{source} is not a .bin verification set. Pass the folder of its images.")
    same = np.array(read_image_pairs(source).same)
    count = max(1, min(FOLDS, int(same.sum()), int((~same).sum())))
    notes: tuple[str, ...] = ()
    folds = _blocks(len(same), count)
    if any(len(np.unique(same[folds == fold])) < 2 for fold in range(1, count + 1)):
        # Each fold needs both kinds.
        for kind in (True, False):
            folds[same == kind] = _blocks(int((same == kind).sum()), count)
        notes = ("pairs are ordered by kind, so blocks of each kind form the folds",)
    pairs = tuple(
        Pair(1 + row, str(2 * row), str(2 * row + 1), bool(same[row]), str(fold))
        for row, fold in enumerate(folds)
    )
    templates = {str(n): (f"{source}{SEPARATOR}{n}",) for n in range(2 * len(pairs))}
    return PairProtocol(str(source), "BIN", pairs, templates, notes=notes)._skip({})


def _blocks(count: int, folds: int) -> npt.NDArray[np.int64]:
    """Return the number of the fold, from 1, of each of the pairs; earlier folds are larger."""
    blocks = np.array_split(np.arange(count), folds)
    return np.repeat(np.arange(1, folds + 1), [len(block) for block in blocks])


def _describe_skipped(pairs: Iterable[Pair], reasons: Mapping[str, str]) -> list[str]:
    return [
        f"line {pair.line}: {reason}"
        for pair in pairs
        if (reason := reasons.get(pair.first) or reasons.get(pair.second))
    ]


def _recognize(source: Path, text: str) -> Format:
    """Return the format of a pair list by its first line."""
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


def _label_notes(source: Path, text: str, kind: Format, corrected: bool) -> tuple[str, ...]:
    """Return which labels of YTF are used if the list has both."""
    has_both = kind == "YTF" and any(line.count(",") == 5 for line in text.splitlines())
    if corrected and not has_both:
        raise UsageError(f"{source} has no corrected labels. Omit --corrected-labels.")
    if not has_both:
        return ()
    used = "corrected" if corrected else "published"
    return (f"the {used} labels of YTF are used (option --corrected-labels)",)


def _read_rows(source: Path, text: str, kind: Format, corrected: bool) -> list[Pair]:
    """Read YTF's list or CSV; the first line may be a header."""
    columns = "split,pair,image,image,same" if kind == "YTF" else "image,image,same[,fold]"
    pairs: list[Pair] = []
    reader = csv.reader(text.splitlines(), strict=True, skipinitialspace=True)
    try:
        for row in reader:
            fields = [field.strip() for field in row]
            header = {"split number", "same"} & {field.lower() for field in fields}
            if not any(fields) or (header and not pairs):
                continue
            line = ",".join(fields)
            if kind == "YTF" and len(fields) in (5, 6) and fields[0].isdecimal():
                # The corrected list appends the corrected value.
                fields = [fields[2], fields[3], fields[-1 if corrected else 4], fields[0]]
            elif kind == "YTF" or len(fields) not in (3, 4):
                raise ValueError(f"expected {columns}, got {line!r}")
            first, second, same, fold = (*fields, "")[:4]
            if not first or not second or first == second:
                raise ValueError(f"expected two images: {first!r}, {second!r}")
            if same.lower() not in _SAME:
                raise ValueError(f"same is {same!r}. Use one of {', '.join(_SAME)}.")
            if pairs and bool(fold) != bool(pairs[0].fold):
                raise ValueError(f"expected a fold in every line or in none, got {line!r}")
            pairs.append(Pair(reader.line_num, first, second, _SAME[same.lower()], fold))
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{source}, line {reader.line_num}: {error}") from error
    if not pairs:
        raise ValueError(f"{source} has no pairs")
    if pairs[0].fold:
        return pairs
    # Without folds, distribute both kinds over ten, or over fewer if there are too few pairs.
    kinds = Counter(pair.same for pair in pairs)
    count = min(FOLDS, kinds[True], kinds[False]) or 1
    seen: Counter[bool] = Counter()
    for i, pair in enumerate(pairs):
        pairs[i] = pair._replace(fold=str(1 + seen[pair.same] % count))
        seen[pair.same] += 1
    return pairs


def _find_images(
    root: Path, names: Iterable[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, str]]:
    """Return the files of each name below a folder, and the reasons for missing ones."""

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
        path, problem = root / name, f"no such image: {name}"
        folder, files = path.parent, [path.name]
        if path.is_dir():
            folder, files = path, images_below(path)[0]
            problem = f"the video {name} has no frames"
        elif not path.is_file():
            stem = path.stem if path.suffix.lower() in EXTENSIONS else path.name
            files = stems(folder).get(stem, [])
            if len(files) > 1:
                files, problem = [], f"{name} is ambiguous: {' and '.join(files)}"
        if files:
            templates[name] = tuple(str(folder / file) for file in files)
        else:
            missing[name] = problem
    return templates, missing
