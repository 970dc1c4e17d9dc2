"""Identification against distractors: the MegaFace protocol.

Each trial takes a probe and one of its mates in the gallery and asks how many distractors are at
least as near to the probe as the mate. Distractors stream past in tiles, so a million of them
cost no more memory than a few thousand.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._common import by_device, chunks
from proximetry.metrics.distributed import gather_objects, together
from proximetry.metrics.inputs import (
    Embeddings,
    FloatSimilarity,
    Labels,
    as_count,
    as_labels,
    as_vectors,
    check_similarity,
    encode,
    full_precision,
)
from proximetry.metrics.task import project
from proximetry.metrics.verification import allowed_accepts

# Distractors, and their place if they are the gallery.
_Tile = tuple[Tensor, slice | None]

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

    ``tar_at_far`` holds the rates that could be measured, ``unmeasurable_far`` those asked for
    that are below one in ``impostor_pairs``, the pairs of a probe and a distractor.
    """

    probes: Tensor
    mates: Tensor
    ranks: Tensor
    rates: dict[int, float]
    distractors: int
    probes_without_mate: int
    impostor_pairs: int
    tar_at_far: dict[float, float] = field(default_factory=dict)
    unmeasurable_far: tuple[float, ...] = ()

    def cmc(self, depth: int) -> Tensor:
        """The cumulative match curve: the rank-k rate for k = 1 … depth, float64."""
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        counts = torch.bincount(self.ranks.clamp(max=depth + 1), minlength=depth + 2)
        return counts[1 : depth + 1].cumsum(0).double() / len(self.ranks)

    def __str__(self) -> str:
        rates = [f"rank-{k} {rate:.4f}" for k, rate in self.rates.items()]
        rates += [f"TAR@FAR={far:g} {tar:.4f}" for far, tar in self.tar_at_far.items()]
        rates += [f"TAR@FAR={far:g} not measurable" for far in self.unmeasurable_far]
        return f"{', '.join(rates)} ({len(self.ranks)} trials, {self.distractors} distractors)"


def identify(
    probes: Embeddings,
    probe_labels: Labels,
    gallery: Embeddings | None = None,
    gallery_labels: Labels | None = None,
    *,
    distractors: Embeddings | Iterable[Embeddings] | None = None,
    ranks: Sequence[int] = (1, 5, 10),
    far: Sequence[float] = (),
    similarity: FloatSimilarity = "cosine",
    ignore_groups: Labels | None = None,
    gallery_ignore_groups: Labels | None = None,
    progress: Callable[[int], None] | None = None,
    group: dist.ProcessGroup | None = None,
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

    For each ``far`` the result has the largest fraction of trials that a threshold can accept
    which accepts at most that fraction of all pairs of a probe and a distractor, as in ``verify``.

    ``progress`` is called with the number of distractors seen. With a ``group`` every process
    hands over the same probes and gallery and its own share of the distractors, and returns the
    same result; of a closed set the processes divide the gallery among themselves.
    """
    check_similarity(similarity, FloatSimilarity)
    _check_asked(ranks, far)
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
        tiles: Iterable[_Tile]
        if distractors is None:
            known: int | None = len(held)
            hidden = len(probe) + _equal_pairs(never, held_never)
            tiles = ((right[at], at) for at in _share(list(chunks(len(held), width)), group))
        else:
            known, hidden = _total(distractors, group), 0
            blocks = _blocks(distractors, asked, similarity, width)
            tiles = ((project(block, block, similarity)[1], None) for block in blocks)
        allowed = allowed_accepts(max(far), len(asked) * known - hidden) if far and known else None
        accepts = _FalseAccepts(scores, allowed) if far else None
        beaten, seen = together(
            lambda: _count_beaten(left, bars, tiles, no_distractors, accepts, progress), group
        )
    if group is not None:
        seen = sum(gather_objects(seen, group))
        for counts in (beaten, *([accepts.counts] if accepts else ())):
            dist.all_reduce(counts, group=group)
    if not seen:
        raise ValueError("distractors is empty; leave it out to use the gallery instead")
    # A distractor that beats a near mate beats all farther ones of that probe too.
    behind = beaten.flip(1).cumsum(1).flip(1)[:, 1:]
    places = torch.empty_like(behind).scatter_(1, order, 1 + behind)[probe, column]
    impostors = len(asked) * seen - hidden
    found = {rate: accepts.tar(allowed_accepts(rate, impostors)) for rate in far} if accepts else {}
    return Identification(
        probe,
        mate,
        places,
        {k: float((places <= k).double().mean()) for k in ranks},
        seen,
        int((mates == 0).sum()),
        impostors,
        {rate: tar for rate, tar in found.items() if tar is not None},
        tuple(rate for rate, tar in found.items() if tar is None),
    )


def _check_asked(ranks: Sequence[int], far: Sequence[float]) -> None:
    if not ranks:
        raise ValueError("ranks is empty; give at least one, such as (1,)")
    for rank in ranks:
        as_count(rank, "ranks")
    for rate in far:
        allowed_accepts(rate, 1)  # refuses what is no rate


class _FalseAccepts:
    """How many pairs of a probe and a distractor are accepted at the similarity of each trial."""

    def __init__(self, scores: Tensor, allowed: int | None) -> None:
        self.bars = scores.sort().values
        self.counts = torch.zeros(len(scores) + 1, dtype=torch.int64, device=scores.device)
        self._allowed = allowed  # at the highest rate asked for; None if nobody knows yet
        self._lowest = float(self.bars[0])

    def add(self, scores: Tensor) -> None:
        """Count the pairs of a tile."""
        near = torch.searchsorted(self.bars, scores[scores >= self._lowest], right=True)
        self.counts += torch.bincount(near, minlength=len(self.counts))

    def forget(self) -> None:
        """Stop looking below the thresholds that accept more pairs than are allowed already."""
        if self._allowed is not None:
            left = self.bars[self._accepted() <= self._allowed]
            self._lowest = float(left[0]) if len(left) else torch.inf

    def tar(self, allowed: int) -> float | None:
        """The most trials that a threshold with so few false accepts accepts; None for no pair."""
        return float((self._accepted() <= allowed).double().mean()) if allowed else None

    def _accepted(self) -> Tensor:
        return self.counts.flip(0).cumsum(0).flip(0)[1:]


def _share(parts: list[slice], group: dist.ProcessGroup | None) -> list[slice]:
    """What this process takes of what all have."""
    return parts if group is None else parts[dist.get_rank(group) :: dist.get_world_size(group)]


def _total(
    distractors: Embeddings | Iterable[Embeddings], group: dist.ProcessGroup | None
) -> int | None:
    """How many distractors there are on all processes, unless one of them streams."""
    own = len(distractors) if isinstance(distractors, (Tensor, np.ndarray)) else None
    counts = [own] if group is None else gather_objects(own, group)
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


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


def _equal_pairs(asked: Tensor, held: Tensor) -> int:
    """How many pairs of a probe and a gallery row have one number."""
    return int(torch.bincount(held, minlength=int(asked.max()) + 1)[asked].sum())


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
    tiles: Iterable[_Tile],
    hidden: Callable[[slice, slice], Tensor],
    accepts: _FalseAccepts | None,
    progress: Callable[[int], None] | None,
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
            if accepts is not None:
                accepts.add(scores)
            beaten = torch.searchsorted(bars[rows], scores, right=True)
            high, wide = counts[rows].shape
            beaten += wide * torch.arange(high, device=beaten.device)[:, None]
            found = torch.bincount(beaten.view(-1), minlength=high * wide)
            counts[rows] += found.view(high, wide)
        if accepts is not None:
            accepts.forget()
        if progress is not None:
            progress(seen)
    return counts, seen
