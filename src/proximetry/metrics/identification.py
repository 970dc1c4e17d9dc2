"""Identification against distractors: the MegaFace protocol.

Each trial counts the distractors that are at least as near to a probe as one of its mates.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.labels import Labels
from proximetry._util.machine import by_device
from proximetry._util.tensors import chunks
from proximetry._util.types import FloatArray, FloatSimilarity, IntArray, Progress
from proximetry.metrics._search.similarities import full_precision, project
from proximetry.metrics._search.validation import (
    Embeddings,
    Items,
    as_count,
    as_vectors,
    check_inputs,
    check_similarity,
    encode,
)
from proximetry.metrics.distributed import gather_objects, raise_on_all_ranks
from proximetry.metrics.verification import allowed_accepts

# Probes and distractors of one tile of similarities.
_PROBES = {"cpu": 1024, "cuda": 4096}
_DISTRACTORS = {"cpu": 4096, "cuda": 8192}
# Trials whose vectors are gathered together.
_TRIALS = 2**14
_NAMES = (
    ("probes", "probe_labels", "ignore_groups"),
    ("gallery", "gallery_labels", "gallery_ignore_groups"),
)

Distractors = Embeddings | Iterable[Embeddings]
# Projected distractors, and their slice of the gallery in a closed set.
_Tile = tuple[Tensor, slice | None]


@dataclass(frozen=True)
class Identification:
    """The result of ``identify``: one trial per probe and mate, ordered by probe.

    ``ranks[t]`` is the rank of ``mates[t]`` (a gallery row) among the distractors for
    ``probes[t]``, from 1. ``rates[k]`` is the fraction of trials with rank at most k.
    ``distractors`` is the number of distractors (in a closed set: of gallery rows).

    ``tar_at_far`` holds the measurable rates, ``unmeasurable_far`` those below one in
    ``impostor_pairs``, the number of pairs of a probe and a distractor.
    """

    probes: IntArray
    mates: IntArray
    ranks: IntArray
    rates: dict[int, float]
    distractors: int
    probes_without_mate: int
    impostor_pairs: int
    tar_at_far: dict[float, float] = field(default_factory=dict)
    unmeasurable_far: tuple[float, ...] = ()

    def cmc(self, depth: int) -> FloatArray:
        """Return the cumulative match curve: the rank-k rate for k = 1 … depth."""
        as_count(depth, "depth")
        counts = np.bincount(np.minimum(self.ranks, depth + 1), minlength=depth + 2)
        return counts[1 : depth + 1].cumsum() / len(self.ranks)

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
    distractors: Distractors | None = None,
    ranks: Sequence[int] = (1, 5, 10),
    far: Sequence[float] = (),
    similarity: FloatSimilarity = "cosine",
    ignore_groups: Labels | None = None,
    gallery_ignore_groups: Labels | None = None,
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> Identification:
    """Rank every mate of every probe among the distractors.

    Each pair of a probe and a mate (a gallery row with the same label) is a trial, without other
    mates of the probe. A distractor exactly as near as the mate counts against the probe. Scores
    are float64 and tie up to 1e-13 of the vectors' lengths.

    Args:
        probes: [probes, dimensions].
        probe_labels: one integer or string per probe.
        gallery: the mates; by default the probes.
        gallery_labels: one per gallery row, if there is a gallery.
        distractors: items of classes that are not among the probes: a matrix, a ``numpy.memmap``,
            or an iterable of matrices that is read once. By default, gallery rows of other labels
            are the distractors (closed-set identification).
        ranks: the k of the rank-k rates.
        far: false accept rates. The result has the true accept rate at each: the largest fraction
            of trials accepted by a threshold that accepts at most that fraction of all pairs of a
            probe and a distractor, as in `verify`.
        similarity: "cosine", "euclidean" or "dot".
        ignore_groups: one per probe; gallery rows of a probe's group are excluded. If probes are
            also gallery items, pass row indices to exclude self-matches.
        gallery_ignore_groups: the groups of the gallery rows, if there is a gallery.
        progress: called with (done, total) distractors; the total is 0 if unknown.
        group: every process passes the same probes and gallery and a share of the distractors, and
            gets the same result; the gallery of a closed set is divided among the processes.

    Examples:
        >>> import numpy as np
        >>> from proximetry.metrics import identify
        >>> probes = np.array([[1.0, 0.0], [0.8, 0.6]])
        >>> result = identify(probes, ["Ann", "Ann"], distractors=np.array([[0.6, 0.8]]), ranks=[1])
        >>> result.ranks.tolist(), result.rates
        ([1, 2], {1: 0.5})
    """
    check_similarity(similarity, FloatSimilarity)
    for rank in ranks or (0,):
        as_count(rank, "ranks")
    for rate in far:
        allowed_accepts(rate, 1)  # raises for invalid rates
    raw = (probes, probe_labels, ignore_groups), (gallery, gallery_labels, gallery_ignore_groups)
    trials = _Trials(check_inputs(similarity, *raw, names=_NAMES), similarity)
    total = len(trials.right) if distractors is None else _count_distractors(distractors, group)
    # False accepts beyond those at the highest rate need not be counted.
    limit = allowed_accepts(max(far), len(trials.left) * total) if total and far else math.inf
    with full_precision(trials.left.device):
        tiles = trials.gallery_tiles(group) if distractors is None else trials.tiles(distractors)
        report = None if progress is None else lambda done: progress(done, total)
        compare = partial(trials.compare, tiles, limit if far else -1, report)
        outranked, accepted, distractor_count, impostors = raise_on_all_ranks(compare, group)
    if group is not None:
        shares = gather_objects((distractor_count, impostors), group)
        distractor_count, impostors = (sum(share) for share in zip(*shares, strict=True))
        for counts in (outranked, accepted):
            dist.all_reduce(counts, group=group)
    if not distractor_count:
        raise ValueError("distractors is empty. Omit it to use the gallery instead.")
    probe_ranks = trials.ranks(outranked)
    allowed = {rate: allowed_accepts(rate, impostors) for rate in far}
    accepts = _reverse_cumsum(accepted)
    return Identification(
        trials.probe.cpu().numpy(),
        trials.mate.cpu().numpy(),
        probe_ranks,
        {k: float(np.mean(probe_ranks <= k)) for k in ranks},
        distractor_count,
        int((trials.mates == 0).sum()),
        impostors,
        {rate: float((accepts <= n).double().mean()) for rate, n in allowed.items() if n},
        tuple(rate for rate, n in allowed.items() if not n),
    )


class _Trials:
    """All pairs of a probe and a mate; ``left @ right.T`` are the similarities to the gallery."""

    def __init__(self, sets: list[Items], similarity: FloatSimilarity) -> None:
        probes, gallery = sets[0].vectors.double(), sets[-1].vectors.double()
        self.similarity, self.dim, self.device = similarity, probes.shape[1], probes.device
        # By default each row is a group.
        groups = [
            np.arange(len(items)) + start if items.groups is None else items.groups
            for start, items in zip((0, len(probes)), sets, strict=False)
        ]
        # Codes of the probes and of the gallery, which may be the same.
        self.labels, self.groups = (
            [torch.from_numpy(part).to(self.device) for part in encode(*arrays)[0]]
            for arrays in ([items.labels for items in sets], groups)
        )
        self.probe, self.mate = self._pairs()
        with full_precision(self.device):
            self.left, self.right = project(probes, gallery, similarity)
            parts = [
                (self.left[self.probe[at]] * self.right[self.mate[at]]).sum(1)
                for at in chunks(len(self.probe), _TRIALS)
            ]
            self.scores = torch.cat(parts) - 1e-13 * self._magnitude(probes, gallery)
        # A row per probe, its mates from far to near.
        self.mates = torch.bincount(self.probe, minlength=len(probes))
        self.filled = torch.arange(int(self.mates.max()), device=self.device) < self.mates[:, None]
        thresholds = self.left.new_full(self.filled.shape, torch.inf)
        thresholds[self.filled] = self.scores
        self.thresholds, self.order = thresholds.sort(dim=1)

    def _pairs(self) -> tuple[Tensor, Tensor]:
        """Return all pairs of a probe and a mate of another group, by probe."""
        pairs = []
        for rows in chunks(len(self.labels[0]), by_device(self.device, **_PROBES)):
            mates = self.labels[0][rows, None] == self.labels[-1]
            mates &= self.groups[0][rows, None] != self.groups[-1]
            probe, mate = mates.nonzero(as_tuple=True)
            pairs.append(torch.stack([probe + rows.start, mate]))
        probe, mate = torch.cat(pairs, dim=1)
        if not len(probe):
            raise ValueError("no probe has a mate in the gallery. Check the labels.")
        return probe, mate

    def _magnitude(self, probes: Tensor, gallery: Tensor) -> Tensor:
        """Return the magnitude of the terms of each trial's similarity, which scales rounding."""
        lengths, others = (rows.square().sum(1).sqrt() for rows in (probes, gallery))
        if self.similarity == "cosine":
            return torch.ones_like(lengths[self.probe])
        if self.similarity == "dot":
            return lengths[self.probe] * others.max()  # a short mate may tie with a long distractor
        return torch.square(lengths[self.probe] + others[self.mate])

    def gallery_tiles(self, group: dist.ProcessGroup | None) -> Iterator[_Tile]:
        """Yield the gallery in tiles; with a group, the share of this process."""
        slices = list(chunks(len(self.right), by_device(self.device, **_DISTRACTORS)))
        if group is not None:
            slices = slices[dist.get_rank(group) :: dist.get_world_size(group)]
        return ((self.right[at], at) for at in slices)

    def tiles(self, distractors: Distractors) -> Iterator[_Tile]:
        """Yield the distractors in tiles; only one tile at a time is converted."""
        single = isinstance(distractors, Tensor | np.ndarray)
        size = by_device(self.device, **_DISTRACTORS)
        for number, block in enumerate([distractors] if single else distractors):
            where = "distractors" if single else f"distractors, block {number}"
            for at in chunks(len(block), size):
                name = where if len(block) <= size else f"{where}[{at.start}:{at.stop}]"
                part = as_vectors(block[at], self.similarity, name)
                if part.shape[1] != self.dim:
                    raise ValueError(
                        f"{where} has {part.shape[1]} dimensions, the probes have {self.dim}"
                    )
                part = part.to(self.device, torch.float64)
                yield project(part, part, self.similarity)[1], None

    def compare(
        self, tiles: Iterable[_Tile], limit: float, progress: Callable[[int], None] | None
    ) -> tuple[Tensor, Tensor, int, int]:
        """Count distractors between the similarities of mates.

        Return the number of distractors that outrank exactly the j farthest mates of a probe
        [probes, j]; the number of impostor pairs accepted at exactly the j lowest similarities of
        all trials [j], unless ``limit`` pairs are accepted there already; and the numbers of
        distractors and of impostor pairs.
        """
        thresholds = self.scores.sort().values
        outranked = self.probe.new_zeros((len(self.left), self.thresholds.shape[1] + 1))
        accepted = self.probe.new_zeros(len(thresholds) + 1)
        distractor_count = impostors = 0
        for others, at in tiles:
            distractor_count += len(others)
            valid = thresholds[_reverse_cumsum(accepted) <= limit]
            lowest = float(valid[0]) if len(valid) else torch.inf
            for rows in chunks(len(self.left), by_device(self.device, **_PROBES)):
                scores = self.left[rows] @ others.T
                impostors += scores.numel()
                if at is not None:
                    excluded = self.labels[0][rows, None] == self.labels[-1][at]
                    excluded |= self.groups[0][rows, None] == self.groups[-1][at]
                    scores.masked_fill_(excluded, -torch.inf)
                    impostors -= int(excluded.sum())
                near = torch.searchsorted(thresholds, scores[scores >= lowest], right=True)
                accepted += torch.bincount(near, minlength=len(accepted))
                outranked[rows] += _count_outranked(self.thresholds[rows], scores)
            if progress is not None:
                progress(distractor_count)
        return outranked, accepted, distractor_count, impostors

    def ranks(self, outranked: Tensor) -> IntArray:
        """Return the rank of each trial from the counts of `compare`."""
        # A distractor that outranks a near mate outranks all farther mates of that probe too.
        nearer = _reverse_cumsum(outranked)
        ranks = torch.empty_like(nearer).scatter_(1, self.order, 1 + nearer)
        return ranks[self.filled].cpu().numpy()


def _count_outranked(thresholds: Tensor, scores: Tensor) -> Tensor:
    """Return the number of scores that reach exactly the first j thresholds of their row."""
    width = thresholds.shape[1] + 1
    reached = torch.searchsorted(thresholds, scores, right=True)
    reached += width * torch.arange(len(scores), device=scores.device)[:, None]
    return torch.bincount(reached.view(-1), minlength=len(scores) * width).view(-1, width)


def _reverse_cumsum(counts: Tensor) -> Tensor:
    """Return the sums of counts from 1, 2, … to the last, along the last dimension."""
    return counts.flip(-1).cumsum(-1).flip(-1)[..., 1:]


def _count_distractors(distractors: Distractors, group: dist.ProcessGroup | None) -> int:
    """Return the number of distractors on all processes, 0 if any process streams them."""
    local = len(distractors) if isinstance(distractors, Tensor | np.ndarray) else None
    counts = [local] if group is None else gather_objects(local, group)
    sizes = [count for count in counts if count is not None]
    return sum(sizes) if len(sizes) == len(counts) else 0
