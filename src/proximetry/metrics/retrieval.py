"""``retrieve``: the exact nearest neighbours of every query, as a ``RetrievalResult``."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from proximetry._common import Progress, atomic_path
from proximetry.metrics.inputs import (
    Embeddings,
    IntArray,
    Labels,
    Similarity,
    as_count,
    check_similarity,
    full_precision,
)
from proximetry.metrics.neighbors import search
from proximetry.metrics.reranking import distances_to
from proximetry.metrics.task import build, check

FORMAT = "proximetry.retrieval/1"
_ARRAYS = ("ids", "similarities")
_LABELS = ("query_codes", "gallery_codes", "classes", "positives")
_ABOUT = ("gallery_size", "similarity", "is_self_search")


@dataclass(frozen=True, eq=False, repr=False)
class RetrievalResult:
    """The ``k`` nearest gallery items of every query, nearest first.

    All arrays are NumPy arrays on the CPU. Labels are kept as ``classes[codes]``; the last four
    attributes are None where the search was made without labels.

    Attributes:
        ids: gallery index of each neighbour, [queries, k]; −1 where there are fewer than k.
        similarities: larger is nearer, −inf beside an id of −1. The cosine or dot product; for
            "euclidean" and "hamming" the negative distance.
        gallery_size: how many items were searched.
        similarity: what "near" means.
        is_self_search: whether every item of the gallery was a query against the others.
        query_codes: class number of each query.
        gallery_codes: class number of each gallery item.
        classes: the label of each class number, integers or strings.
        positives: how many items of its class each query could find (itself and ignored ones
            left out).
    """

    ids: IntArray
    similarities: npt.NDArray[np.floating[Any]]
    gallery_size: int
    similarity: Similarity
    is_self_search: bool
    query_codes: IntArray | None = None
    gallery_codes: IntArray | None = None
    classes: npt.NDArray[Any] | None = None
    positives: IntArray | None = None

    def __post_init__(self) -> None:
        check_similarity(self.similarity)
        if self.ids.ndim != 2 or self.ids.shape != self.similarities.shape:
            raise ValueError(
                f"ids {self.ids.shape} and similarities {self.similarities.shape} must be "
                "matrices of one shape"
            )
        for name, length in (
            ("query_codes", len(self.ids)),
            ("positives", len(self.ids)),
            ("gallery_codes", self.gallery_size),
        ):
            values = getattr(self, name)
            if (values is None) != (self.classes is None):
                raise ValueError(f"give all of {', '.join(_LABELS)}, or none")
            if values is not None and len(values) != length:
                raise ValueError(f"{name} has {len(values)} entries, expected {length}")
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
    def complete(self) -> bool:
        """Whether the lists hold everything there is to find, so that no k is too large."""
        return self.k >= self.gallery_size - int(self.is_self_search)

    def _labeled(self) -> tuple[IntArray, IntArray, npt.NDArray[Any]]:
        if self.query_codes is None or self.gallery_codes is None or self.classes is None:
            raise ValueError(
                "this search was made without labels; give them to retrieve() to know hits"
            )
        return self.query_codes, self.gallery_codes, self.classes

    @property
    def hits(self) -> npt.NDArray[np.bool_]:
        """Which neighbours have the query's label, [queries, k]."""
        query_codes, gallery_codes, _ = self._labeled()
        found = gallery_codes[np.maximum(self.ids, 0)] == query_codes[:, None]
        return cast("npt.NDArray[np.bool_]", found & (self.ids >= 0))

    @property
    def query_labels(self) -> npt.NDArray[Any]:
        """The label of each query."""
        codes, _, classes = self._labeled()
        return classes[codes]

    @property
    def gallery_labels(self) -> npt.NDArray[Any]:
        """The label of each gallery item."""
        _, codes, classes = self._labeled()
        return classes[codes]

    @property
    def labels(self) -> npt.NDArray[Any]:
        """The label of each neighbour, [queries, k]; look at ``ids`` for places that are empty."""
        _, codes, classes = self._labeled()
        return classes[codes[np.maximum(self.ids, 0)]]

    def confusions(self) -> list[tuple[Any, Any, int]]:
        """Label of the query, label of its nearest item where it is another, and how often.

        The most frequent come first. Queries that could find nothing do not count.
        """
        missed = ~self.hits[:, 0] & (self.ids[:, 0] >= 0)
        if self.positives is not None:
            missed &= self.positives > 0
        pairs = zip(self.query_labels[missed], self.labels[missed, 0], strict=True)
        return [(query, other, count) for (query, other), count in Counter(pairs).most_common()]

    def __getitem__(
        self, queries: int | slice | Sequence[int] | npt.NDArray[Any]
    ) -> RetrievalResult:
        """The result for some of the queries: a number, a slice, a list, a mask."""
        # NumPy would make floats of an empty list.
        index = queries if isinstance(queries, slice | list) else np.asarray(queries)
        chosen = np.atleast_1d(np.arange(len(self))[index])
        return replace(
            self,
            ids=self.ids[chosen],
            similarities=self.similarities[chosen],
            query_codes=None if self.query_codes is None else self.query_codes[chosen],
            positives=None if self.positives is None else self.positives[chosen],
        )

    def top(self, k: int) -> RetrievalResult:
        """The same with shorter lists."""
        if as_count(k, "k") > self.k:
            raise ValueError(f"k must lie between 1 and {self.k}, got {k}")
        return replace(self, ids=self.ids[:, :k], similarities=self.similarities[:, :k])

    def __repr__(self) -> str:
        against = "each other" if self.is_self_search else f"{self.gallery_size} gallery items"
        known = "no labels" if self.classes is None else f"{len(self.classes)} classes"
        return (
            f"RetrievalResult({len(self)} queries against {against}, k={self.k}, "
            f"similarity={self.similarity!r}, {known})"
        )

    def __str__(self) -> str:
        """A few lists as text: label, then neighbours as id:label, a star at each hit."""
        lines = [repr(self)]
        for query in range(min(len(self), 5)):
            shown, name = self[query].top(min(self.k, 6)), str(query)
            marks = [""] * shown.k
            if shown.classes is not None:
                name = str(shown.query_labels[0])
                named = zip(shown.labels[0], shown.hits[0], strict=True)
                marks = [f":{label}{'*' if hit else ''}" for label, hit in named]
            cells = [
                f"{i}{mark} {near:.3f}"
                for i, mark, near in zip(shown.ids[0], marks, shown.similarities[0], strict=True)
                if i >= 0
            ]
            lines.append(f"  {name} → " + ", ".join(cells))
        if len(self) > 5:
            lines.append(f"  … and {len(self) - 5} more queries")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to one ``.npz`` file, all or nothing: a reader never meets half a file."""
        target = Path(path)
        about = {"format": FORMAT} | {name: getattr(self, name) for name in _ABOUT}
        names = _ARRAYS if self.classes is None else _ARRAYS + _LABELS
        arrays: dict[str, Any] = {name: getattr(self, name) for name in names}
        arrays["about"] = np.array(json.dumps(about))
        with atomic_path(target) as part, part.open("wb") as file:
            np.savez_compressed(file, **arrays)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RetrievalResult:
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if about["format"] != FORMAT:
                    raise ValueError(f"format {about['format']!r}, this version reads {FORMAT!r}")
                arrays = {name: file[name] for name in _ARRAYS + _LABELS if name in file}
            return cls(**arrays, **{name: about[name] for name in _ABOUT})
        except FileNotFoundError:
            raise
        except Exception as error:
            raise ValueError(f"{os.fspath(path)} is not a retrieval result: {error}") from error


def retrieve(
    embeddings: Embeddings,
    labels: Labels | None = None,
    *,
    queries: Embeddings | None = None,
    query_labels: Labels | None = None,
    k: int = 10,
    similarity: Similarity = "cosine",
    ignore_groups: Labels | None = None,
    query_ignore_groups: Labels | None = None,
    progress: Progress | None = None,
) -> RetrievalResult:
    """Find the k nearest gallery items of every query, exactly.

    The order is decided in the precision of the vectors, float32 for most, as in `evaluate`. For
    "euclidean" the distances are then computed in float64: where they are small against the
    lengths of the vectors, they tell items apart that the order does not.

    Args:
        embeddings: the gallery, [items, dimensions]: a torch tensor on any device or a NumPy
            array, of any floating type (half precision is computed in float32); packed ``uint8``
            codes for "hamming".
        labels: one integer or string per gallery item, if hits are to be known.
        queries: what to search for; without it every item is a query against all others, and
            itself left out by its index.
        query_labels: one per query, if there are labels.
        k: neighbours per query; all there are if the gallery is smaller.
        similarity: "cosine", "euclidean", "dot" or "hamming".
        ignore_groups: one integer or string per gallery item; a query never meets an item of its
            own group (same burst, same camera). Where queries stand in the gallery too, the number
            of its row with each keeps them from finding themselves.
        query_ignore_groups: the groups of the queries, if there are queries.
        progress: called with (done, total) after each block.

    Raises:
        ValueError: if shapes, kinds or values do not fit; the message says which.
    """
    k = as_count(k, "k")
    given = (embeddings, labels, ignore_groups)
    asked = (queries, query_labels, query_ignore_groups)
    items, searched_for = check(similarity, given, asked, allow_unlabeled=True)
    task = build(items, searched_for, similarity)
    count, device = len(task.queries), task.gallery.device
    # Without itself, an item has one neighbour fewer.
    depth = max(1, min(k, len(task.gallery) - (task.own is not None)))
    ids = np.empty((count, depth), dtype=np.int64)
    wide = task.gallery.dtype == torch.float64
    similarities = np.empty((count, depth), dtype=np.float64 if wide else np.float32)
    with full_precision(device):
        depths = torch.full((count,), depth, device=device)
        for block in search(task, depths, with_ranks=False, progress=progress):
            near = block.similarities
            if similarity == "euclidean":
                # In 2 q·g − |q|² − |g|² half of their digits were lost.
                vectors = (items if searched_for is None else searched_for).vectors[block.rows]
                near = -distances_to(vectors, items.vectors, block.ids)
                near = near.masked_fill(block.ids < 0, -torch.inf)
            rows = block.rows.cpu().numpy()
            ids[rows] = block.ids.cpu().numpy()
            similarities[rows] = near.cpu().numpy()
    result = RetrievalResult(ids, similarities, len(task.gallery), similarity, task.own is not None)
    if labels is None:
        return result
    return replace(
        result,
        query_codes=task.query_codes.cpu().numpy(),
        gallery_codes=task.gallery_codes.cpu().numpy(),
        classes=task.classes,
        positives=task.positives().cpu().numpy(),
    )
