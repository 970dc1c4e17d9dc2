"""Face identification among distractors: MegaFace's protocol, also on a single folder."""

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.charts import line_chart, step_points
from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write, read_text
from proximetry._util.formatting import format_int, join_first
from proximetry._util.types import Progress
from proximetry.data import open_dataset
from proximetry.data.folders import images_below, is_image
from proximetry.data.vectors import load_arrays
from proximetry.faces import BadImages, Flip
from proximetry.faces.face_embedder import FaceEmbedder
from proximetry.faces.file_embedder import FileEmbedder, describe_rates, with_notes
from proximetry.metrics import Identification, identify

Vectors: TypeAlias = npt.NDArray[Any]
AnyPath: TypeAlias = str | os.PathLike[str]

FAR = (1e-3, 1e-4, 1e-5, 1e-6)
RANKS = (1, 5, 10, 100)
DEPTH = 100  # largest rank of the cumulative match curve
_BLOCK = 4096  # distractors compared per step; an embedder returns fewer at a time


@dataclass(frozen=True)
class ProbeSet:
    """Probes and distractors before embedding.

    Attributes:
        files: the probes, at least two images per person.
        labels: the person in each probe.
        distractors: image files, or vectors.
        source: origin of the distractors.
        notes: notes for the result.
    """

    files: tuple[str, ...]
    labels: tuple[str, ...]
    distractors: "Sequence[str] | Vectors"
    source: str
    notes: tuple[str, ...] = ()


def read_people(
    probes: AnyPath,
    distractors: AnyPath | None = None,
    *,
    probe_list: AnyPath | None = None,
    distractor_list: AnyPath | None = None,
    noises: Sequence[AnyPath] = (),
    bad_images: BadImages = "error",
) -> ProbeSet:
    """Read probes from a folder of people, and distractors.

    Probes are all images of people with at least two. Distractors are all images below a folder
    or the vectors of a ``.npy`` or ``.npz`` file; by default, people with one image in ``probes``.

    Args:
        probes: folder with one folder of images per person.
        distractors: folder, or file of vectors.
        probe_list: use only these probes: a list of MegaFace (JSON with ``path``, or a text file
            with one path per line). Paths match without their extension, and if they end alike.
        distractor_list: use only these distractors.
        noises: lists of wrong images to exclude from probes and distractors.
        bad_images: "error" raises for listed images that do not exist, "skip" notes them.
    """
    catalog = open_dataset("faces", Path(probes))
    noise = [entry for file in noises for entry in _read_list(Path(file))]
    selected, list_notes = _select(catalog.paths, probe_list, noise, str(probes), bad_images)
    catalog = catalog.subset(selected)
    counts = Counter(catalog.labels)
    rows = [row for row, label in enumerate(catalog.labels) if counts[label] > 1]
    single = [row for row, label in enumerate(catalog.labels) if counts[label] == 1]
    if not rows:
        raise UsageError(
            f"{probes}: each of the {len(counts)} people has one image. A probe needs another "
            "image of the same person."
        )
    notes = [*catalog.notes, *list_notes]
    others: Sequence[str] | Vectors
    if distractors is not None:
        others, source = _read_distractors(Path(distractors), Path(probes)), str(distractors)
        if isinstance(others, np.ndarray):
            if distractor_list is not None:
                raise UsageError("--distractor-list is for a folder of distractors. Omit it.")
        else:
            selected, more = _select(
                [os.path.relpath(file, distractors) for file in others],
                distractor_list,
                noise,
                str(distractors),
                bad_images,
            )
            others = [others[row] for row in selected]
            notes += more
        if single:
            names = join_first(catalog.labels[row] for row in single)
            notes.append(f"{len(single)} people have one image and are not probes: {names}")
    elif single:
        others, source = [catalog.file(row) for row in single], f"people with one image in {probes}"
    else:
        raise UsageError(
            f"{probes}: all people have several images, so there are no distractors. Pass "
            "--distractors."
        )
    files = tuple(catalog.file(row) for row in rows)
    labels = tuple(catalog.labels[row] for row in rows)
    return ProbeSet(files, labels, others, source, tuple(notes))


def _read_list(file: Path) -> list[tuple[str, ...]]:
    """Read a list of MegaFace or of InsightFace's noises: the parts of each path, no extension."""
    if not file.is_file():
        raise UsageError(f"no such list of images: {file}. Pass a text file or a JSON file.")
    text = read_text(file, limit=2**30)
    if text.lstrip().startswith("{"):
        try:
            names = json.loads(text)["path"]
        except (ValueError, KeyError, RecursionError) as error:
            raise ValueError(f'{file} is not a list of MegaFace, JSON with "path"') from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f'{file}: "path" is not a list of names')
    else:
        # Lines of noises may begin with a number and a tab.
        lines = (line.strip().rpartition("\t")[2] for line in text.splitlines())
        names = [line for line in lines if line and not line.startswith("#")]
    return [_parts(name) for name in names]


def _parts(name: str) -> tuple[str, ...]:
    path = PurePosixPath(name.replace(os.sep, "/"))
    return (path.with_suffix("") if is_image(path.name) else path).parts


def _select(
    paths: Sequence[str],
    listed: AnyPath | None,
    noise: Sequence[tuple[str, ...]],
    folder: str,
    bad_images: BadImages,
) -> tuple[list[int], list[str]]:
    """Return the rows of the images in a list and not among the noises, and notes."""
    images = [_parts(path) for path in paths]
    rows, notes = list(range(len(images))), list[str]()
    if listed is not None:
        entries = _read_list(Path(listed))
        found = _matches(images, entries)
        rows = [row for row in rows if found[row]]
        missing = [e for e, hit in zip(entries, _matches(entries, images), strict=True) if not hit]
        if missing:
            text = (
                f"{len(missing)} of {len(entries)} images of {listed} are not in {folder}: "
                f"{join_first('/'.join(entry) for entry in missing)}"
            )
            if bad_images == "error":
                raise ValueError(f"{text}. Skip them with --bad-images skip.")
            notes.append(text)
    wrong = _matches(images, noise)
    selected = [row for row in rows if not wrong[row]]
    if len(selected) < len(rows):
        notes.append(f"{len(rows) - len(selected)} images of {folder} are excluded as noise")
    if not selected:
        raise ValueError(f"{folder}: no image is left after applying the lists")
    return selected, notes


def _matches(paths: Sequence[tuple[str, ...]], others: Sequence[tuple[str, ...]]) -> list[bool]:
    """Return for each path whether it and one of the others end alike: the shorter is the end."""
    exact = set(others)
    lengths = sorted({len(other) for other in others})
    ends = {
        length: {other[-length:] for other in others if len(other) >= length}
        for length in {len(path) for path in paths}
    }
    return [
        path in ends[len(path)] or any(path[-n:] in exact for n in lengths if n < len(path))
        for path in paths
    ]


def _read_distractors(path: Path, probes: Path) -> "Sequence[str] | Vectors":
    if path.is_dir():
        inner, outer = path.resolve(), probes.resolve()
        if inner.is_relative_to(outer) or outer.is_relative_to(inner):
            raise UsageError(
                f"--distractors {path} and the probes in {probes} are the same images. Omit "
                "--distractors to use people with one image as distractors."
            )
        files = [str(path / name) for name in images_below(path)[0]]
        if not files:
            raise UsageError(f"--distractors {path}: no images in this folder. Pass another one.")
        return files
    if path.suffix not in (".npy", ".npz"):
        raise UsageError(f"--distractors must be a folder of images, .npy or .npz, got {path}")
    vectors: Vectors = load_arrays(path)["vectors"]
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or not vectors.size:
        raise ValueError(
            f"--distractors {path} has shape {list(vectors.shape)}, {vectors.dtype}. Expected "
            "float vectors [distractors, dimensions]."
        )
    return vectors


@dataclass(frozen=True)
class PeopleIdentification:
    """Result of `identify_people`."""

    result: Identification
    probes: int
    people: int
    distractors_from: str
    embedder: FaceEmbedder
    views: str
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the result as JSON-compatible values."""
        r = self.result
        return {
            "embedder": self.embedder.source,
            "views": self.views,
            "similarity": "cosine",
            "probes": self.probes,
            "people": self.people,
            "trials": len(r.ranks),
            "distractors": r.distractors,
            "distractors_from": self.distractors_from,
            "rank": {str(k): rate for k, rate in r.rates.items()},
            "cmc": r.cmc(DEPTH).tolist(),
            "impostor_pairs": r.impostor_pairs,
            "tar_at_far": {f"{far:g}": tar for far, tar in r.tar_at_far.items()},
            "unmeasurable_far": list(r.unmeasurable_far),
            "skipped": list(self.skipped),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        r = self.result
        rates = describe_rates(r, "too few pairs")
        lines = [
            f"{format_int(self.probes)} probes of {format_int(self.people)} people, "
            f"{format_int(len(r.ranks))} trials, {format_int(r.distractors)} distractors; "
            f"cosine of {self.views}",
            ", ".join(f"rank-{k} {100 * rate:.2f} %" for k, rate in r.rates.items()),
            f"TAR at FAR {rates} ({format_int(r.impostor_pairs)} pairs of different people)",
        ]
        return with_notes(lines, self.skipped, "images", self.notes)


def identify_people(
    embedder: FaceEmbedder,
    people: ProbeSet,
    *,
    flip: Flip | None = None,
    batch_size: int = 64,
    bad_images: BadImages = "error",
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> PeopleIdentification:
    """Identify people among distractors with MegaFace's protocol; options as in `verify_pairs`.

    Each image of a person is a probe for each other image of that person among all distractors.
    By default, vectors combine image and mirror image, unless the distractors are vectors of images
    only. They are compared by cosine. Distractors are streamed, not held in memory.

    Examples:
        >>> from PIL import Image
        >>> from proximetry import Embedder
        >>> from proximetry.faces import identify_people, open_embedder, read_people
        >>> for name, color in (("ann/1", "red"), ("ann/2", "red"), ("bob/1", "blue")):
        ...     Path("people", name).parent.mkdir(parents=True, exist_ok=True)
        ...     Image.new("RGB", (32, 32), color).save(f"people/{name}.png")
        >>> embedder = Embedder.create("small_convnet", 8, weights="none", image_size=32)
        >>> folder = embedder.save("embedder")
        >>> people = read_people("people")  # Bob, with a single image, is a distractor
        >>> identify_people(open_embedder(folder), people).result.rates[1]
        1.0
    """
    distractors, requested = people.distractors, flip
    flip = embedder.resolve_flip(requested)
    faces = FileEmbedder(embedder, flip, batch_size, bad_images, group)
    if isinstance(distractors, np.ndarray) and distractors.shape[1] != faces.width:
        width = distractors.shape[1]
        if width != embedder.dim or requested is not None:
            raise UsageError(
                f"--distractors {people.source} has vectors of {width} dimensions, and "
                f"{embedder.source} returns {faces.width} with --flip {flip}. Embed both in the "
                "same way."
            )
        faces.flip = "none"
    total = len(people.files) + len(distractors)
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def report(before: int, done: int) -> None:
        if progress is not None:  # all processes advance equally
            progress(min(total, before + done * size), total)

    sums = faces.sum_by_owner(people.files, range(len(people.files)), lambda n, _: report(0, n))
    readable = [row for row, file in enumerate(people.files) if file not in faces.unreadable]
    counts = Counter(people.labels[row] for row in readable)
    rows = [row for row in readable if counts[people.labels[row]] > 1]
    if not rows:
        raise ValueError("no person has two readable images")
    count = len(distractors)
    result = identify(
        sums[rows].to(embedder.device),
        [people.labels[row] for row in rows],
        distractors=distractors[count * rank // size : count * (rank + 1) // size]
        if isinstance(distractors, np.ndarray)
        else _embed_blocks(faces, distractors),
        ranks=RANKS,
        far=FAR,
        progress=lambda done, _: report(len(people.files), done),
        group=group,
    )
    faces.share_unreadable()
    notes = [*people.notes, *embedder.size_notes(people.files[0])]
    if len(rows) < len(readable):
        notes.append(f"{len(readable) - len(rows)} images have no other image of their person")
    return PeopleIdentification(
        result,
        len(rows),
        len({people.labels[row] for row in rows}),
        people.source,
        embedder,
        faces.views,
        tuple(f"{file}: {reason}" for file, reason in sorted(faces.unreadable.items())),
        tuple(notes),
    )


def _embed_blocks(faces: FileEmbedder, files: Sequence[str]) -> Iterator[Tensor]:
    """Embed distractors and yield them in large blocks."""
    batches = (vectors for _, vectors in faces.batches(files))
    while block := list(islice(batches, -(-_BLOCK // faces.batch_size))):
        yield torch.cat(block)


def draw_cmc(result: Identification, label: str, out: Path) -> None:
    """Draw the cumulative match curve as SVG."""
    points = step_points([*range(1, DEPTH + 1), DEPTH], result.cmc(DEPTH).tolist())
    title = "identification rate (%)"
    x_label = f"rank among {result.distractors} distractors"
    chart = line_chart(title, {label: points}, x_label=x_label, log=True, file=True)
    atomic_write(out, chart.encode())
