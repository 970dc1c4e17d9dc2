"""Identification against distractors: the MegaFace protocol.

Each trial takes a probe and one of its mates in the gallery and asks how many distractors are at
least as near to the probe as the mate. Distractors stream past in tiles, so a million of them
cost no more memory than a few thousand.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
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
    normalize,
)

# Probes and distractors of one tile of similarities.
_PROBES = {"cpu": 1024, "cuda": 4096}
_DISTRACTORS = {"cpu": 4096, "cuda": 16384}
# Places of a tile searched at once, such that a processor's cache holds them.
_AT_ONCE = {"cpu": 2**16, "cuda": 2**24}
# Rows compared one by one in float64 at a time.
_ROWS = 2**14


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
) -> Identification:
    """Rank every mate of every probe among the distractors.

    Each pair of a probe and a mate (a gallery row with the same label) is a trial of its own:
    other mates of the same person are left out. Without a ``gallery`` the probes are the gallery
    too, each left out for itself by index. ``distractors`` are people who are none of the probes:
    a matrix, a ``numpy.memmap``, or an iterable of matrices that is read once, block by block.
    Without them the gallery's rows of other labels take their place (closed-set identification).

    A distractor exactly as near as the mate counts against the probe. Similarities too close to
    call in float32 are compared again in float64 (equal to 1e-13 is a tie), so copies of a vector
    really tie.
    """
    check_similarity(similarity, FloatSimilarity)
    if not ranks or any(isinstance(k, bool) or k < 1 for k in ranks):
        raise ValueError(f"ranks must be whole numbers from 1, got {tuple(ranks)}")
    if (gallery is None) != (gallery_labels is None):
        raise ValueError("give gallery and gallery_labels together, or neither")
    asked = as_vectors(probes, similarity, "probes")
    held = (
        asked if gallery is None else _matching(as_vectors(gallery, similarity, "gallery"), asked)
    )
    names = [as_labels(probe_labels, len(asked), "probe_labels")]
    if gallery_labels is not None:
        names.append(as_labels(gallery_labels, len(held), "gallery_labels"))
    codes = [torch.from_numpy(part).to(asked.device) for part in encode(*names)[0]]
    people, held_people = codes[0], codes[-1]
    trials = _Trials.between(people, held_people, own=gallery is None)
    with full_precision(asked.device):
        ranker = _Ranker(asked, held, people, trials, similarity)
        if distractors is None:
            for part in chunks(len(held), ranker.width):
                ranker.count(held[part], held_people[part])
        else:
            for block in _blocks(distractors, asked, similarity, ranker.width):
                ranker.count(block)
            if not ranker.seen:
                raise ValueError("distractors is empty; leave it out to use the gallery instead")
    places = ranker.ranks()
    return Identification(
        trials.probes,
        trials.mates,
        places,
        {k: float((places <= k).double().mean()) for k in ranks},
        ranker.seen,
        trials.without_mate,
    )


def _matching(matrix: Tensor, probes: Tensor, name: str = "gallery") -> Tensor:
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
            yield _matching(as_vectors(block[at : at + width], similarity, name), probes, where)


@dataclass(frozen=True)
class _Trials:
    """All pairs of a probe and a mate, grouped by probe: those of probe p are starts[p:p+2]."""

    probes: Tensor
    mates: Tensor
    starts: Tensor
    without_mate: int

    @staticmethod
    def between(people: Tensor, held: Tensor, *, own: bool) -> "_Trials":
        ordered, order = held.sort(stable=True)
        first = torch.searchsorted(ordered, people)
        counts = torch.searchsorted(ordered, people, right=True) - first
        probes = torch.arange(len(people), device=people.device).repeat_interleave(counts)
        before = (counts.cumsum(0) - counts)[probes]
        within = torch.arange(len(probes), device=people.device) - before
        mates = order[first[probes] + within]
        if own:
            others = probes != mates
            probes, mates, counts = probes[others], mates[others], counts - 1
        if not len(probes):
            raise ValueError("no probe has a mate in the gallery; are the labels right?")
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return _Trials(probes, mates, starts, int((counts == 0).sum()))


class _Ranker:
    """Counts, for every trial, the distractors at least as near as the mate.

    Scores order the others as seen from one probe as their similarity does: p·g for the dot
    product, p·g/|g| for the cosine, −½|p − g|² for the distance. A tile of scores has the
    precision of the embeddings; what lies within its rounding error of a mate is settled in
    float64, row by row.
    """

    def __init__(
        self,
        probes: Tensor,
        gallery: Tensor,
        people: Tensor,
        trials: _Trials,
        similarity: FloatSimilarity,
    ) -> None:
        self.people, self.trials, self.similarity = people, trials, similarity
        self.probes = _moderate(probes) if similarity == "cosine" else probes
        self.seen = 0
        self.height = by_device(probes.device, **_PROBES)
        self.width = by_device(probes.device, **_DISTRACTORS)
        self.at_once = by_device(probes.device, **_AT_ONCE)
        self.squares = self.probes.double().square().sum(1)
        self.reach = self._longest(gallery)
        counts = trials.starts[1:] - trials.starts[:-1]
        self.steps = int(counts.max()).bit_length()
        exact = torch.cat(
            [
                self._exact(self.probes[trials.probes[part]], gallery[trials.mates[part]])
                for part in chunks(len(trials.probes), _ROWS)
            ]
        )
        # Within a probe the mates go from far to near, so one search finds all that are beaten.
        by_score = exact.argsort(stable=True)
        self.order = by_score[trials.probes[by_score].argsort(stable=True)]
        self.scores = exact[self.order]
        # beaten[i]: how many distractors beat the mate i of a probe and no nearer one.
        self.beaten = torch.zeros(len(exact), dtype=torch.int64, device=probes.device)

    def _exact(self, probes: Tensor, others: Tensor) -> Tensor:
        probes, others = probes.double(), others.double()
        if self.similarity == "euclidean":
            return (probes - others).square().sum(1) * -0.5
        return (probes * (normalize(others) if self.similarity == "cosine" else others)).sum(1)

    def _longest(self, others: Tensor) -> float:
        """The largest length among what probes are multiplied with: the scale of the rounding."""
        if self.similarity == "cosine":
            return 1.0
        return float(torch.linalg.vector_norm(others, dim=1, dtype=torch.float64).max())

    def count(self, others: Tensor, people: Tensor | None = None) -> None:
        """Let a tile of distractors pass; with ``people``, those of the probe's own are skipped."""
        self.seen += len(others)
        vectors = normalize(others) if self.similarity == "cosine" else others
        reach = max(self.reach, self._longest(others))
        for rows in chunks(len(self.probes), self.height):
            scores = self.probes[rows] @ vectors.T
            scale = self.squares[rows].sqrt() * reach
            if self.similarity == "euclidean":
                scores -= 0.5 * others.square().sum(1)
                scores -= 0.5 * self.squares[rows, None].to(scores.dtype)
                scale += 0.5 * (self.squares[rows] + reach * reach)
            # Sums run over lanes of 16 values or more, so this bounds their rounding error.
            depth = 16 + vectors.shape[1] / 16
            self._count_tile(
                scores, scale * (depth * torch.finfo(scores.dtype).eps), others, people, rows
            )

    def _count_tile(
        self, scores: Tensor, tolerance: Tensor, others: Tensor, people: Tensor | None, rows: slice
    ) -> None:
        starts = self.trials.starts[rows.start : rows.stop + 1]
        # The farthest mate comes first; a probe without mates can be beaten by nobody.
        farthest = self.scores[starts[:-1].clamp(max=len(self.scores) - 1)] - 2 * tolerance
        farthest = torch.where(starts[1:] > starts[:-1], farthest, torch.inf).to(scores.dtype)
        row, column = (scores >= farthest[:, None]).nonzero(as_tuple=True)
        for part in chunks(len(row), self.at_once):
            self._place(scores, tolerance, others, people, rows, row[part], column[part])

    def _place(
        self,
        scores: Tensor,
        tolerance: Tensor,
        others: Tensor,
        people: Tensor | None,
        rows: slice,
        row: Tensor,
        column: Tensor,
    ) -> None:
        """Find which mates the distractors in some places of the tile beat."""
        if people is not None:
            strangers = people[column] != self.people[rows][row]
            row, column = row[strangers], column[strangers]
        score, margin = scores[row, column].double(), tolerance[row]
        begin, end = self.trials.starts[row + rows.start], self.trials.starts[row + rows.start + 1]
        beaten = self._mates_up_to(score - margin, begin, end)
        following = self.scores[beaten.clamp(max=len(self.scores) - 1)]
        doubtful = ((beaten < end) & (following <= score + margin)).nonzero()[:, 0]
        for part in chunks(len(doubtful), _ROWS):
            case = doubtful[part]
            beaten[case] = self._settled(
                row[case] + rows.start, others[column[case]], begin[case], end[case]
            )
        first, last = (int(self.trials.starts[at]) for at in (rows.start, rows.stop))
        places = beaten[beaten > begin] - 1 - first
        self.beaten[first:last] += torch.bincount(places, minlength=last - first)

    def _settled(self, probe: Tensor, others: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """The same search in float64; equal up to its rounding is a tie."""
        score = self._exact(self.probes[probe], others)
        slack = score.abs()
        if self.similarity != "euclidean":
            slack = slack + self.squares[probe].sqrt() * self.reach
        return self._mates_up_to(score + 1e-13 * slack, begin, end)

    def _mates_up_to(self, score: Tensor, begin: Tensor, end: Tensor) -> Tensor:
        """Where the mates beaten by a score end: a binary search inside each probe's mates."""
        low, high = begin, end
        for _ in range(self.steps):
            middle = (low + high) // 2
            searching = low < high
            beaten = searching & (self.scores[middle.clamp(max=len(self.scores) - 1)] <= score)
            low, high = (
                torch.where(beaten, middle + 1, low),
                torch.where(searching & ~beaten, middle, high),
            )
        return low

    def ranks(self) -> Tensor:
        """The rank of every trial, in the order of the trials."""
        # A distractor that beats a near mate beats all farther ones of that probe too.
        total = self.beaten.flip(0).cumsum(0).flip(0)
        behind = torch.cat([total, total.new_zeros(1)])
        ends = self.trials.starts[self.trials.probes[self.order] + 1]
        result = torch.empty_like(total)
        result[self.order] = 1 + total - behind[ends]
        return result


def _moderate(matrix: Tensor) -> Tensor:
    """Rows scaled by powers of two, which is exact, so that no length over- or underflows."""
    exponent = torch.frexp(matrix.abs().amax(1, keepdim=True)).exponent.double()
    return (matrix.double() * torch.exp2(-exponent.clamp(min=-1000.0))).to(matrix.dtype)
