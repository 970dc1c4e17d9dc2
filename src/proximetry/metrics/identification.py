"""Identification against distractors: the MegaFace protocol.

Each trial takes a probe and one of its mates in the gallery and asks how many distractors are at
least as near to the probe as the mate. Distractors stream past in tiles, so a million of them
cost no more memory than a few thousand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._common import by_device, chunks
from proximetry.metrics.inputs import (
    Embeddings,
    FloatSimilarity,
    Labels,
    as_labels,
    as_vectors,
    check_similarity,
    encode,
    full_precision,
)
from proximetry.metrics.task import project

# Probes and distractors of one tile of similarities.
_PROBES = {"cpu": 1024, "cuda": 4096}
_DISTRACTORS = {"cpu": 4096, "cuda": 8192}
# Trials whose vectors are gathered at once.
_TRIALS = 2**14


@dataclass(frozen=True)
class Identification:
    """The result of ``identify``: one trial per probe and mate, ordered by probe.

    ``ranks[t]`` is the place of the mate ``mates[t]`` (a row of the gallery) among the distractors
    as seen from ``probes[t]``, counting from 1. ``rates[k]`` is the fraction of trials with rank
    at most k. Probes without a mate take part in no trial and are counted. ``distractors`` is how
    many were looked at (in the closed set: the rows of the gallery).
    """

    probes: Tensor
    mates: Tensor
    ranks: Tensor
    rates: dict[int, float]
    distractors: int
    probes_without_mate: int

    def cmc(self, depth: int) -> Tensor:
        """The cumulative match curve: the rank-k rate for k = 1 … depth, float64."""
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        counts = torch.bincount(self.ranks.clamp(max=depth + 1), minlength=depth + 2)
        return counts[1 : depth + 1].cumsum(0).double() / len(self.ranks)

    def __str__(self) -> str:
        rates = ", ".join(f"rank-{k} {rate:.4f}" for k, rate in self.rates.items())
        return f"{rates} ({len(self.ranks)} trials, {self.distractors} distractors)"


def identify(
    probes: Embeddings,
    probe_labels: Labels,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    *,
    distractors: Embeddings | Iterable[Embeddings] | None = None,
    ranks: Sequence[int] = (1, 5, 10),
    similarity: FloatSimilarity = "cosine",
    ignore_groups: Labels | None = None,
    gallery_ignore_groups: Labels | None = None,
) -> Identification:
    """Rank every mate of every probe among the distractors.

    Each pair of a probe and a mate (a gallery row with the same label) is a trial of its own:
    other mates of the same person are left out. Without a ``gallery`` the probes are the gallery
    too, each left out for itself by index. ``distractors`` are people who are none of the probes:
    a matrix, a ``numpy.memmap``, or an iterable of matrices that is read once, block by block.
    Without them the gallery's rows of other labels take their place (closed-set identification).
    A probe never meets a gallery row of its own group (``ignore_groups`` of the probes,
    ``gallery_ignore_groups``): where probes stand in the gallery too, give row numbers.

    A distractor exactly as near as the mate counts against the probe. Similarities are compared
    in float64, up to 1e-13 of the vectors' lengths, so copies of a vector really tie.
    """
    check_similarity(similarity, FloatSimilarity)
    if not ranks or any(isinstance(k, bool) or k < 1 for k in ranks):
        raise ValueError(f"ranks must be whole numbers from 1, got {tuple(ranks)}")
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("give gallery and gallery_labels together, or neither")
    if (gallery_ignore_groups is None) != (gallery is None or ignore_groups is None):
        raise ValueError("gallery_ignore_groups goes with a gallery and ignore_groups; give all")
    asked = as_vectors(probes, similarity, "probes").double()
    held = asked
    names = [as_labels(probe_labels, len(asked), "probe_labels")]
    rows = range(len(asked)) if ignore_groups is None else ignore_groups  # each is its own group
    groups = [as_labels(rows, len(asked), "ignore_groups")]
    if gallery is not None:
        held = _like(asked, as_vectors(gallery, similarity, "gallery"), "gallery")
        names.append(as_labels(gallery_labels, len(held), "gallery_labels"))
        if gallery_ignore_groups is None:
            rows = range(len(asked), len(asked) + len(held))
        else:
            rows = gallery_ignore_groups
        groups.append(as_labels(rows, len(held), "gallery_ignore_groups"))
    people, held_people = _numbered(names, asked.device)
    never, held_never = _numbered(groups, asked.device)
    probe, mate = _trials(people, held_people)
    apart = never[probe] != held_never[mate]
    probe, mate = probe[apart], mate[apart]
    if not len(probe):
        raise ValueError("no probe has a mate in the gallery; are the labels right?")

    def no_distractors(rows: slice, at: slice) -> Tensor:
        """The probe's own person, and what it does not meet."""
        return (people[rows, None] == held_people[at]) | (never[rows, None] == held_never[at])

    width = by_device(asked.device, **_DISTRACTORS)
    with full_precision(asked.device):
        left, right = project(asked, held, similarity)
        scores = torch.cat(
            [(left[probe[at]] * right[mate[at]]).sum(1) for at in chunks(len(probe), _TRIALS)]
        )
        scores -= 1e-13 * _scale(asked, held, probe, mate, similarity)
        # A row per probe, its mates from far to near, so one search finds all that are beaten.
        mates = torch.bincount(probe, minlength=len(asked))
        column = torch.arange(len(probe), device=probe.device) - (mates.cumsum(0) - mates)[probe]
        bars = left.new_full((len(asked), int(mates.max())), torch.inf)
        bars[probe, column] = scores
        bars, order = bars.sort(dim=1)
        tiles: Iterable[tuple[Tensor, slice | None]]
        if distractors is None:
            tiles = ((right[at], at) for at in chunks(len(held), width))
        else:
            blocks = _blocks(distractors, asked, similarity, width)
            tiles = ((project(block, block, similarity)[1], None) for block in blocks)
        beaten, seen = _count_beaten(left, bars, tiles, no_distractors)
    if not seen:
        raise ValueError("distractors is empty; leave it out to use the gallery instead")
    # A distractor that beats a near mate beats all farther ones of that probe too.
    behind = beaten.flip(1).cumsum(1).flip(1)[:, 1:]
    places = torch.empty_like(behind).scatter_(1, order, 1 + behind)[probe, column]
    return Identification(
        probe,
        mate,
        places,
        {k: float((places <= k).double().mean()) for k in ranks},
        seen,
        int((mates == 0).sum()),
    )


def _like(probes: Tensor, matrix: Tensor, name: str) -> Tensor:
    if matrix.shape[1] != probes.shape[1]:
        raise ValueError(
            f"{name} has {matrix.shape[1]} dimensions and probes {probes.shape[1]}; they must match"
        )
    return matrix.to(probes.device, probes.dtype)


def _blocks(
    distractors: Embeddings | Iterable[Embeddings],
    probes: Tensor,
    similarity: FloatSimilarity,
    width: int,
) -> Iterator[Tensor]:
    """The distractors in tiles of at most ``width`` rows; only a tile is ever converted."""
    single = isinstance(distractors, (Tensor, np.ndarray))
    for number, block in enumerate([distractors] if single else distractors):
        where = "distractors" if single else f"distractors, block {number}"
        if not isinstance(block, (Tensor, np.ndarray)) or block.ndim != 2:
            found = getattr(block, "shape", type(block).__name__)
            raise ValueError(f"{where} must be a matrix (items × dimensions), got {found}")
        for at in range(0, len(block), width):
            name = where if len(block) <= width else f"{where}[{at}:{at + width}]"
            yield _like(probes, as_vectors(block[at : at + width], similarity, name), where)


def _numbered(arrays: list[npt.NDArray[Any]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Labels or groups of the probes and of the gallery as numbers; without a gallery the same."""
    codes = [torch.from_numpy(part).to(device) for part in encode(*arrays)[0]]
    return codes[0], codes[-1]


def _trials(people: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """All pairs of a probe and a gallery row of one person, by probe."""
    pairs = []
    for rows in chunks(len(people), by_device(people.device, **_PROBES)):
        probe, mate = (people[rows, None] == held).nonzero(as_tuple=True)
        pairs.append(torch.stack([probe + rows.start, mate]))
    probe, mate = torch.cat(pairs, dim=1)
    return probe, mate


def _scale(
    probes: Tensor, gallery: Tensor, probe: Tensor, mate: Tensor, similarity: FloatSimilarity
) -> Tensor:
    """The size of the terms that make up each trial's similarity: rounding is in proportion."""
    lengths, others = (of.square().sum(1).sqrt() for of in (probes, gallery))
    if similarity == "cosine":
        return torch.ones_like(lengths[probe])
    if similarity == "dot":
        return lengths[probe] * others.max()  # a short mate may tie with a long distractor
    return torch.square(lengths[probe] + others[mate])


def _count_beaten(
    left: Tensor,
    bars: Tensor,
    tiles: Iterable[tuple[Tensor, slice | None]],
    hidden: Callable[[slice, slice], Tensor],
) -> tuple[Tensor, int]:
    """How many distractors beat exactly the j farthest mates of a probe, [probes, j]; and how many.

    A tile may come with its place in the gallery: rows ``hidden`` from a probe are then skipped.
    """
    counts = torch.zeros((len(bars), bars.shape[1] + 1), dtype=torch.int64, device=bars.device)
    seen = 0
    for others, at in tiles:
        seen += len(others)
        for rows in chunks(len(left), by_device(left.device, **_PROBES)):
            scores = left[rows] @ others.T
            if at is not None:
                scores.masked_fill_(hidden(rows, at), -torch.inf)
            beaten = torch.searchsorted(bars[rows], scores, right=True)
            high, wide = counts[rows].shape
            beaten += wide * torch.arange(high, device=beaten.device)[:, None]
            found = torch.bincount(beaten.view(-1), minlength=high * wide)
            counts[rows] += found.view(high, wide)
    return counts, seen
