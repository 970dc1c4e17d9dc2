"""Identification of faces among distractors: MegaFace's protocol, also on a single folder."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.errors import Progress, UsageError, some, spaced
from proximetry.data import open_dataset
from proximetry.data.folders import images_below
from proximetry.data.vectors import load_arrays
from proximetry.faces.embedder import FaceEmbedder
from proximetry.faces.options import BadImages
from proximetry.faces.vectors import FaceVectors
from proximetry.metrics import Identification, identify

Vectors: TypeAlias = npt.NDArray[Any]

FAR = (1e-3, 1e-4, 1e-5, 1e-6)
RANKS = (1, 5, 10, 100)
# How far the curve of ranks is told.
DEPTH = 100
# Distractors that are compared at once; an embedder gives fewer at a time.
_BLOCK = 4096


@dataclass(frozen=True)
class People:
    """Who is looked for and among whom; nothing is embedded yet.

    Attributes:
        files: the probes, at least two images of each person.
        labels: who they are.
        distractors: image files, or vectors.
        source: where the distractors come from.
        notes: what a reader of the result has to know.
    """

    files: tuple[str, ...]
    labels: tuple[str, ...]
    distractors: "Sequence[str] | Vectors"
    source: str
    notes: tuple[str, ...] = ()


def read_people(
    probes: str | os.PathLike[str], distractors: str | os.PathLike[str] | None = None
) -> People:
    """Find probes in a folder of people, and distractors.

    The probes are all images of those with at least two. Distractors are all images below a folder
    or the vectors of a ``.npy`` or ``.npz`` file; without any, the images of those people in the
    folder of probes who have only one.
    """
    catalog = open_dataset("faces", Path(probes))
    counts = Counter(catalog.labels)
    rows = [row for row, label in enumerate(catalog.labels) if counts[label] > 1]
    alone = [row for row, label in enumerate(catalog.labels) if counts[label] == 1]
    if not rows:
        raise UsageError(
            f"{probes}: each of the {len(counts)} people there has one image; a probe needs "
            "another image of the same person"
        )
    notes = list(catalog.notes)
    found: Sequence[str] | Vectors
    if distractors is None:
        if not alone:
            raise UsageError(
                f"{probes}: everyone there has several images, so nobody is left as a distractor: "
                "give --distractors"
            )
        found, source = [catalog.file(row) for row in alone], f"people with one image in {probes}"
    else:
        if alone:
            names = some(catalog.labels[row] for row in alone)
            notes.append(f"{len(alone)} people have one image and are no probes: {names}")
        found, source = _read_distractors(Path(distractors), Path(probes)), str(distractors)
    return People(
        tuple(catalog.file(row) for row in rows),
        tuple(catalog.labels[row] for row in rows),
        found,
        source,
        tuple(notes),
    )


def _read_distractors(place: Path, probes: Path) -> "Sequence[str] | Vectors":
    if place.is_dir():
        inner, outer = place.resolve(), probes.resolve()
        if inner == outer or outer in inner.parents or inner in outer.parents:
            raise UsageError(
                f"--distractors {place} and the probes in {probes} are the same images; without "
                "--distractors, people with one image are the distractors"
            )
        files = [str(place / path) for path in images_below(place)[0]]
        if not files:
            raise UsageError(f"--distractors {place}: there are no images in this folder")
        return files
    if place.suffix not in (".npy", ".npz"):
        raise UsageError(f"--distractors {place}: expected a folder of images, .npy or .npz")
    try:
        vectors = load_arrays(place)["vectors"]
    except UsageError as error:
        raise ValueError(f"--distractors: {error}") from error
    if vectors.ndim != 2 or vectors.dtype.kind != "f" or not vectors.size:
        raise ValueError(
            f"--distractors {place} holds {list(vectors.shape)} of {vectors.dtype}; expected "
            "vectors of floating-point numbers, [distractors, dimensions]"
        )
    found: Vectors = vectors
    return found


@dataclass(frozen=True)
class PeopleIdentification:
    """The result of `identify_people`: the figures, and how they were made."""

    result: Identification
    people: int
    distractors_from: str
    embedder: FaceEmbedder
    views: str
    skipped: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def probes(self) -> int:
        """How many probes took part."""
        return len(set(self.result.probes.tolist()))

    def document(self) -> dict[str, Any]:
        """Return everything as plain values."""
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
        rates = [f"{far:g}: {100 * tar:.2f} %" for far, tar in r.tar_at_far.items()]
        rates += [f"{far:g}: too few pairs" for far in r.unmeasurable_far]
        lines = [
            f"{spaced(self.probes)} probes of {spaced(self.people)} people, "
            f"{spaced(len(r.ranks))} trials, {spaced(r.distractors)} distractors; cosine of "
            f"{self.views}",
            ", ".join(f"rank-{k} {100 * rate:.2f} %" for k, rate in r.rates.items()),
            f"TAR at FAR {', '.join(rates)} ({spaced(r.impostor_pairs)} pairs of different people)",
        ]
        if self.skipped:
            lines.append(f"{len(self.skipped)} images skipped:")
            lines += [f"  {reason}" for reason in self.skipped]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def identify_people(
    embedder: FaceEmbedder,
    people: People,
    *,
    batch_size: int = 64,
    bad_images: BadImages = "error",
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> PeopleIdentification:
    """Look for everybody among the distractors, as MegaFace does.

    Each image of a person is a probe for each other image of that person, which hides among all
    distractors. Similarities are cosines of the vectors of the image and its mirror image, or of
    the image alone where the distractors are vectors of that. Distractors stream past: images as
    they are embedded, vectors from their file. With a ``group`` the processes share the images and
    the distractors, and return the same result.
    """
    crowd = people.distractors
    flip = not isinstance(crowd, np.ndarray) or _mirrored(embedder, crowd, people.source)
    faces = FaceVectors(embedder, batch_size, flip, bad_images, group)
    total = len(people.files) + len(crowd)

    def tell(before: int, done: int) -> None:
        if progress is not None:  # the others are as far as this process
            world = 1 if group is None else dist.get_world_size(group)
            progress(min(total, before + done * world), total)

    pooled = faces.pooled(people.files, range(len(people.files)), lambda done, _: tell(0, done))
    readable = [row for row, file in enumerate(people.files) if file not in faces.unreadable]
    counts = Counter(people.labels[row] for row in readable)
    rows = [row for row in readable if counts[people.labels[row]] > 1]
    if not rows:
        raise ValueError("of the images that can be read, no two are of one person")
    stream = _share(crowd, group) if isinstance(crowd, np.ndarray) else _blocks(faces, crowd)
    result = identify(
        pooled[rows].to(embedder.device),
        [people.labels[row] for row in rows],
        distractors=stream,
        ranks=RANKS,
        far=FAR,
        progress=lambda seen, _: tell(len(people.files), seen),
        group=group,
    )
    faces.share_unreadable()
    skipped = [f"{file}: {reason}" for file, reason in sorted(faces.unreadable.items())]
    notes = [*people.notes, *embedder.note_on_size(people.files[0])]
    if len(rows) < len(readable):
        notes.append(f"{len(readable) - len(rows)} images are left without another of their person")
    views = embedder.views if flip else "the image alone, as the distractors are"
    return PeopleIdentification(
        result,
        len({people.labels[row] for row in rows}),
        people.source,
        embedder,
        views,
        tuple(skipped),
        tuple(notes),
    )


def _mirrored(embedder: FaceEmbedder, vectors: Vectors, source: str) -> bool:
    """Tell by their dimension whether vectors describe mirror images too."""
    width, whole = vectors.shape[1], FaceVectors(embedder).width
    if width == whole:
        return True
    if width == embedder.dim:
        return False
    both = f", or {whole} with the mirror image" if whole != embedder.dim else ""
    raise UsageError(
        f"--distractors {source} has vectors of {width} dimensions, and {embedder.source} "
        f"gives {embedder.dim}{both}: embed the distractors with the same embedder"
    )


def _share(vectors: Vectors, group: dist.ProcessGroup | None) -> Vectors:
    """This process's part of the vectors."""
    if group is None:
        return vectors
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return vectors[len(vectors) * rank // size : len(vectors) * (rank + 1) // size]


def _blocks(faces: FaceVectors, files: Sequence[str]) -> Iterator[Tensor]:
    """Embed distractors and yield them, many at once."""
    waiting: list[Tensor] = []
    for _, vectors in faces.batches(files):
        waiting.append(vectors)
        if sum(map(len, waiting)) >= _BLOCK:
            yield torch.cat(waiting)
            waiting = []
    if waiting:
        yield torch.cat(waiting)
