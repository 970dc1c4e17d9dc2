"""``retrieve``: exact neighbours; ``RetrievalResult``: who was asked, who came back, how near."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from proximetry._common import atomic_path
from proximetry.metrics.arrays import Embeddings, IntArray, Labels, full_precision
from proximetry.metrics.neighbours import Metric, Progress, Task, check_metric
from proximetry.metrics.plan import answer, plan

FORMAT = "proximetry.retrieval/1"
_ARRAYS = ("ids", "similarities", "query_codes", "gallery_codes", "classes", "positives")


@dataclass(frozen=True, eq=False, repr=False)
class RetrievalResult:
    """The ``k`` nearest gallery items of every query, nearest first.

    All arrays are NumPy arrays on the processor. Labels are kept as ``classes[codes]``.

    Attributes:
        ids: gallery index of each neighbour, [queries, k]; −1 where there are fewer than k.
        similarities: larger is nearer, −inf beside an id of −1. The cosine or dot product; for
            "euclidean" and "hamming" the negative distance.
        query_codes: class number of each query.
        gallery_codes: class number of each gallery item.
        classes: the label of each class number, integers or strings.
        positives: how many items of its class each query could find (itself and ignored ones
            left out).
        metric: what "near" means.
        is_self_search: whether the gallery was asked about itself.
    """

    ids: IntArray
    similarities: npt.NDArray[np.floating[Any]]
    query_codes: IntArray
    gallery_codes: IntArray
    classes: npt.NDArray[Any]
    positives: IntArray
    metric: Metric
    is_self_search: bool

    def __post_init__(self) -> None:
        check_metric(self.metric)
        queries = len(self.query_codes)
        if self.ids.ndim != 2 or self.ids.shape != self.similarities.shape:
            raise ValueError(
                f"ids {self.ids.shape} and similarities {self.similarities.shape} must be "
                "matrices of one shape"
            )
        if len(self.ids) != queries or len(self.positives) != queries:
            raise ValueError(
                f"{queries} query codes for {len(self.ids)} lists and "
                f"{len(self.positives)} counts of positives"
            )
        if (
            self.ids.size
            and not -1 <= int(self.ids.min()) <= int(self.ids.max()) < self.gallery_size
        ):
            raise ValueError(f"ids must lie between −1 and {self.gallery_size - 1}")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def k(self) -> int:
        """How many neighbours each list holds."""
        return int(self.ids.shape[1])

    @property
    def gallery_size(self) -> int:
        """How many items were searched."""
        return len(self.gallery_codes)

    @property
    def complete(self) -> bool:
        """Whether the lists hold everything there is to find, so that no k is too large."""
        return self.k >= self.gallery_size - int(self.is_self_search)

    @property
    def hits(self) -> npt.NDArray[np.bool_]:
        """Which neighbours have the query's label, [queries, k]."""
        found = self.gallery_codes[np.maximum(self.ids, 0)] == self.query_codes[:, None]
        return cast("npt.NDArray[np.bool_]", found & (self.ids >= 0))

    @property
    def query_labels(self) -> npt.NDArray[Any]:
        """The label of each query."""
        return self.classes[self.query_codes]

    @property
    def gallery_labels(self) -> npt.NDArray[Any]:
        """The label of each gallery item."""
        return self.classes[self.gallery_codes]

    @property
    def labels(self) -> npt.NDArray[Any]:
        """The label of each neighbour, [queries, k]; look at ``ids`` for places that are empty."""
        return self.classes[self.gallery_codes[np.maximum(self.ids, 0)]]

    def __getitem__(
        self, queries: int | slice | Sequence[int] | npt.NDArray[Any]
    ) -> RetrievalResult:
        """The result for some of the queries: a number, a slice, a list, a mask."""
        if isinstance(queries, (int, np.integer)):
            if not -len(self) <= queries < len(self):
                raise IndexError(f"query {queries} of {len(self)}")
            queries = [int(queries)]
        chosen = np.arange(len(self))[
            queries if isinstance(queries, slice) else np.asarray(queries)
        ]
        return replace(
            self,
            ids=self.ids[chosen],
            similarities=self.similarities[chosen],
            query_codes=self.query_codes[chosen],
            positives=self.positives[chosen],
        )

    def top(self, k: int) -> RetrievalResult:
        """The same with shorter lists."""
        if not 1 <= k <= self.k:
            raise ValueError(f"k must lie between 1 and {self.k}, got {k}")
        return replace(self, ids=self.ids[:, :k], similarities=self.similarities[:, :k])

    def __repr__(self) -> str:
        against = "each other" if self.is_self_search else f"{self.gallery_size} gallery items"
        return (
            f"RetrievalResult({len(self)} queries against {against}, k={self.k}, "
            f"metric={self.metric!r}, {len(self.classes)} classes)"
        )

    def __str__(self) -> str:
        """A few lists as text: label, then neighbours as id:label, a star at each hit."""
        lines = [repr(self)]
        for query in range(min(len(self), 5)):
            shown = self[query]
            row = zip(
                shown.ids[0, :6],
                shown.similarities[0],
                shown.labels[0],
                shown.hits[0],
                strict=False,
            )
            cells = [
                f"{i}:{label}{'*' if hit else ''} {near:.3f}"
                for i, near, label, hit in row
                if i >= 0
            ]
            lines.append(f"  {shown.query_labels[0]} → " + ", ".join(cells))
        if len(self) > 5:
            lines.append(f"  … and {len(self) - 5} more queries")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to one ``.npz`` file, all or nothing: a reader never meets half a file."""
        target = Path(path)
        about = {"format": FORMAT, "metric": self.metric, "is_self_search": self.is_self_search}
        arrays: dict[str, Any] = {name: getattr(self, name) for name in _ARRAYS}
        arrays["about"] = np.array(json.dumps(about))
        with atomic_path(target) as part, part.open("wb") as file:
            np.savez_compressed(file, **arrays)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RetrievalResult:
        """Read what :meth:`save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT:
                    raise ValueError(f"format {about['format']!r}, this version reads {FORMAT!r}")
                arrays = {name: file[name] for name in _ARRAYS}
            return cls(**arrays, metric=about["metric"], is_self_search=about["is_self_search"])
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{os.fspath(path)} is not a retrieval result: {error}") from error


def retrieve(
    embeddings: Embeddings,
    labels: Labels,
    *,
    queries: Embeddings | None = None,
    query_labels: Labels | None = None,
    k: int = 10,
    metric: Metric = "cosine",
    ignore_groups: Labels | None = None,
    query_ignore_groups: Labels | None = None,
    progress: Progress | None = None,
) -> RetrievalResult:
    """Find the k nearest gallery items of every query, exactly.

    Args:
        embeddings: the gallery, [items, dimensions]: a torch tensor on any device or a NumPy
            array, of any floating type (half precision is computed in float32); packed ``uint8``
            codes for "hamming".
        labels: one integer or string per gallery item.
        queries: what to ask; without it every item is asked against all others, and itself left
            out by its index.
        query_labels: one per query.
        k: neighbours per query; all there are if the gallery is smaller.
        metric: "cosine", "euclidean", "dot" or "hamming".
        ignore_groups: one integer or string per gallery item; a query never meets an item of its
            own group (same burst, same camera).
        query_ignore_groups: the groups of the queries, if there are queries.
        progress: called with (done, total) after each block.

    Raises:
        ValueError: if shapes, kinds or values do not fit; the message says which.
    """
    if isinstance(k, bool) or int(k) != k or k < 1:
        raise ValueError(f"k must be a whole number from 1 up, got {k!r}")
    prepared = plan(
        embeddings, labels, queries, query_labels, metric, ignore_groups, query_ignore_groups
    )
    task = prepared.task
    with full_precision(task.gallery.device):
        # Without itself, an item has one neighbour fewer.
        depth = max(1, min(k, len(task.gallery) - (task.own is not None)))
        ids, similarities = _collect(task, depth, progress)
        positives = task.positives()
    return RetrievalResult(
        ids=ids,
        similarities=similarities,
        query_codes=task.query_codes.cpu().numpy(),
        gallery_codes=task.gallery_codes.cpu().numpy(),
        classes=prepared.classes,
        positives=positives.cpu().numpy(),
        metric=metric,
        is_self_search=task.own is not None,
    )


def _collect(task: Task, depth: int, progress: Progress | None) -> tuple[IntArray, Any]:
    count = len(task.queries)
    ids = np.empty((count, depth), dtype=np.int64)
    wide = task.gallery.dtype == torch.float64
    similarities = np.empty((count, depth), dtype=np.float64 if wide else np.float32)
    depths = torch.full((count,), depth, device=task.gallery.device)
    for block in answer(task, depths, with_ranks=False, progress=progress):
        rows = block.rows.cpu().numpy()
        ids[rows] = block.ids.cpu().numpy()
        similarities[rows] = block.similarities.cpu().numpy()
    return ids, similarities
