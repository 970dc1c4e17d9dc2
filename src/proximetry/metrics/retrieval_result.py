"""``retrieve``: the exact nearest neighbors of every query, as a ``RetrievalResult``."""

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

from proximetry._util.files import atomic_path
from proximetry._util.labels import Labels
from proximetry._util.types import IntArray, Progress, Similarity
from proximetry.metrics._search.neighbors import search
from proximetry.metrics._search.problem import build_problem
from proximetry.metrics._search.similarities import full_precision
from proximetry.metrics._search.validation import Embeddings, as_count, check_inputs
from proximetry.metrics.reranking import similarities_of

FORMAT = "proximetry.retrieval/1"


@dataclass(frozen=True, eq=False, repr=False)
class RetrievalResult:
    """The ``k`` nearest gallery items of every query, nearest first.

    All arrays are NumPy arrays. Labels are stored as ``classes[codes]``; the last four attributes
    are None without labels.

    Attributes:
        ids: gallery index of each neighbor, [queries, k]; −1 where there are fewer than k.
        similarities: larger is nearer, −inf where the id is −1. The cosine or dot product; for
            "euclidean" and "hamming" the negative distance.
        gallery_size: the number of items searched.
        similarity: "cosine", "euclidean", "dot" or "hamming".
        is_self_search: whether every gallery item is a query against the others.
        query_codes: class index of each query.
        gallery_codes: class index of each gallery item.
        classes: the label of each class index, integers or strings.
        positives: the number of items of each query's class, without itself and ignored ones.
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

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def k(self) -> int:
        """The length of the lists."""
        return int(self.ids.shape[1])

    @property
    def complete(self) -> bool:
        """Whether the lists hold the whole gallery."""
        return self.k >= self.gallery_size - int(self.is_self_search)

    def _labeled(self) -> tuple[IntArray, IntArray, npt.NDArray[Any]]:
        if self.query_codes is None or self.gallery_codes is None or self.classes is None:
            raise ValueError("the retrieval result has no labels. Pass labels to retrieve().")
        return self.query_codes, self.gallery_codes, self.classes

    @property
    def hits(self) -> npt.NDArray[np.bool_]:
        """Which neighbors have the query's label, [queries, k]."""
        query_codes, gallery_codes, _ = self._labeled()
        same = gallery_codes[np.maximum(self.ids, 0)] == query_codes[:, None]
        return cast("npt.NDArray[np.bool_]", same & (self.ids >= 0))

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
        """The label of each neighbor, [queries, k]; undefined where ``ids`` is −1."""
        _, codes, classes = self._labeled()
        return classes[codes[np.maximum(self.ids, 0)]]

    def confusions(self) -> list[tuple[Any, Any, int]]:
        """Return (query label, label of its nearest item, count) of wrong nearest items.

        The most frequent come first. Queries without a positive do not count.
        """
        wrong = ~self.hits[:, 0] & (self.ids[:, 0] >= 0)
        if self.positives is not None:
            wrong &= self.positives > 0
        pairs = zip(self.query_labels[wrong], self.labels[wrong, 0], strict=True)
        return [(query, other, count) for (query, other), count in Counter(pairs).most_common()]

    def __getitem__(
        self, queries: int | slice | Sequence[int] | npt.NDArray[Any]
    ) -> RetrievalResult:
        """Return the result of some queries: an index, a slice, a list or a mask."""
        # NumPy converts an empty list to floats.
        index = queries if isinstance(queries, slice | list) else np.asarray(queries)
        rows = np.atleast_1d(np.arange(len(self))[index])
        return replace(
            self,
            ids=self.ids[rows],
            similarities=self.similarities[rows],
            query_codes=None if self.query_codes is None else self.query_codes[rows],
            positives=None if self.positives is None else self.positives[rows],
        )

    def top(self, k: int) -> RetrievalResult:
        """Return the result with lists of length k."""
        if as_count(k, "k") > self.k:
            raise ValueError(f"k must be between 1 and {self.k}, got {k}")
        return replace(self, ids=self.ids[:, :k], similarities=self.similarities[:, :k])

    def __repr__(self) -> str:
        against = "each other" if self.is_self_search else f"{self.gallery_size} gallery items"
        classes = "no labels" if self.classes is None else f"{len(self.classes)} classes"
        return (
            f"RetrievalResult({len(self)} queries against {against}, k={self.k}, "
            f"similarity={self.similarity!r}, {classes})"
        )

    def __str__(self) -> str:
        """Return the first lists as text, with a star at each hit."""
        lines = [repr(self)]
        labeled = self.classes is not None
        for query in range(min(len(self), 5)):
            nearest, cells = self[query].top(min(self.k, 6)), []
            for rank in np.flatnonzero(nearest.ids[0] >= 0):
                cell = f"{nearest.ids[0, rank]}"
                if labeled:
                    cell += f":{nearest.labels[0, rank]}{'*' if nearest.hits[0, rank] else ''}"
                cells.append(f"{cell} {nearest.similarities[0, rank]:.3f}")
            name = nearest.query_labels[0] if labeled else query
            lines.append(f"  {name} → " + ", ".join(cells))
        if len(self) > 5:
            lines.append(f"  … and {len(self) - 5} more queries")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write one ``.npz`` file atomically."""
        target = Path(path)
        values = {name: value for name, value in vars(self).items() if value is not None}
        about = {name: v for name, v in values.items() if not isinstance(v, np.ndarray)}
        arrays = {name: v for name, v in values.items() if name not in about}
        arrays["about"] = np.array(json.dumps({"format": FORMAT, **about}))
        with atomic_path(target) as part, part.open("wb") as file:
            np.savez_compressed(file, **arrays)
        return target

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> RetrievalResult:
        """Load a result written by `save`."""
        try:
            with np.load(path, allow_pickle=False) as file:
                about = json.loads(str(file["about"]))
                if (version := about.pop("format")) != FORMAT:
                    raise ValueError(f"format {version!r}; this version reads {FORMAT!r}")
                return cls(**{name: file[name] for name in file if name != "about"}, **about)
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

    Neighbors are ranked in the precision of the vectors, as in `evaluate`. The returned Euclidean
    distances are recomputed in float64.

    Args:
        embeddings: the gallery, [items, dimensions]: a torch tensor on any device or a NumPy
            array, of any floating type (half precision is computed in float32); packed ``uint8``
            codes for "hamming".
        labels: one integer or string per gallery item, to mark hits.
        queries: vectors to search for; by default every gallery item, against all others.
        query_labels: one per query, if there are labels.
        k: neighbors per query; all items if the gallery is smaller.
        similarity: "cosine", "euclidean", "dot" or "hamming".
        ignore_groups: one integer or string per gallery item; items of a query's group (same
            burst, same camera) are excluded. If queries are also gallery items, pass row indices
            to exclude self-matches.
        query_ignore_groups: the groups of the queries, if there are queries.
        progress: called with (done, total) after each block.

    Raises:
        ValueError: if shapes, types or values do not match.

    Examples:
        >>> import numpy as np
        >>> import proximetry as px
        >>> gallery = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
        >>> result = px.retrieve(gallery, queries=gallery[:1], k=2)
        >>> result.ids.tolist(), result.similarities.round(3).tolist()
        ([[0, 2]], [[1.0, 0.6]])
    """
    k = as_count(k, "k")
    raw = (embeddings, labels, ignore_groups), (queries, query_labels, query_ignore_groups)
    sets = check_inputs(similarity, *raw, allow_unlabeled=True)
    problem = build_problem(sets, similarity)
    count, device = len(problem.queries), problem.gallery.device
    # Without itself, an item has one neighbor fewer.
    depth = max(1, min(k, len(problem.gallery) - (problem.self_index is not None)))
    ids = np.empty((count, depth), dtype=np.int64)
    wide = problem.gallery.dtype == torch.float64
    similarities = np.empty((count, depth), dtype=np.float64 if wide else np.float32)
    with full_precision(device):
        depths = torch.full((count,), depth, device=device)
        for block in search(problem, depths, with_ranks=False, progress=progress):
            near = block.similarities
            if similarity == "euclidean":
                # From differences: 2 q·g − |q|² − |g|² loses half of the digits.
                queries = sets[-1].vectors[block.rows]
                near = similarities_of(queries, sets[0].vectors, block.ids, similarity)
            rows = block.rows.cpu().numpy()
            ids[rows] = block.ids.cpu().numpy()
            similarities[rows] = near.cpu().numpy()
    arrays = {}
    if labels is not None:
        arrays = {
            "query_codes": problem.query_codes.cpu().numpy(),
            "gallery_codes": problem.gallery_codes.cpu().numpy(),
            "classes": problem.classes,
            "positives": problem.positives().cpu().numpy(),
        }
    is_self_search = problem.self_index is not None
    size = len(problem.gallery)
    return RetrievalResult(ids, similarities, size, similarity, is_self_search, **arrays)
