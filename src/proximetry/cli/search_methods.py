"""Further search methods that `proximetry evaluate` measures beside the plain one.

Binary codes, query expansion and k-reciprocal re-ranking: each has a row of its own, with what was
done, and none changes the plain figures.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import Progress, UsageError, spaced
from proximetry.cli.output import wrap
from proximetry.metrics import (
    Evaluation,
    Metrics,
    binary_codes,
    evaluate,
)
from proximetry.metrics.codes import FEWEST, candidates
from proximetry.metrics.reranking import ALPHA, K1, K2, RERANKED, WEIGHT
from proximetry.metrics.scores import COUNTS
from proximetry.models.names import Similarity
from proximetry.training.reporting import metrics_table

TIMED = 100
"""Queries that are timed."""

Array = npt.NDArray[Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class SearchMethods:
    """Those that were asked for."""

    binary: bool
    expand: int
    rerank: bool

    def check(self, similarity: Similarity) -> None:
        """Refuse what vectors that are compared so cannot be searched by."""
        if self.expand and similarity != "cosine":
            raise UsageError(
                f"--expand is for embeddings that are compared by the cosine, not {similarity}"
            )


def make_rows(
    methods: SearchMethods,
    plain: Evaluation,
    compared: Mapping[str, Any],
    wanted: Metrics,
    progress: Progress,
) -> list[Row]:
    """Return a row for each search method, the plain one first; nothing if there is no other."""
    if methods == SearchMethods(binary=False, expand=0, rerank=False):
        return []
    near, kept = compared["similarity"], candidates(FEWEST)
    given: Any = {**compared, "metrics": wanted.of_lists(), "progress": progress}
    rows = [_row(f"vectors, {near}", f"float32 vectors, {near}, exact", plain, compared)]

    def add(name: str, protocol: str, found: Evaluation) -> None:
        rows.append(_row(name, protocol, found, compared))

    if methods.binary:
        signs = "sign of each dimension (bit 1 if positive), nothing fitted to these images"
        add(
            "binary codes, Hamming distance",
            f"{signs}; Hamming distance, exact, equal distances by index",
            evaluate(**given, binary=True),
        )
        add(
            f"binary codes, {kept} re-ranked",
            f"{signs}; the {kept} nearest by Hamming distance ordered by the {near} of their "
            "vectors, all others behind them",
            evaluate(**given, binary=True, candidates=kept),
        )
        costs = _bytes_per_image(compared), _milliseconds_per_query(compared, kept)
        for row, size, taken in zip(rows, *costs, strict=True):
            row |= {"bytes_per_image": size, "milliseconds_per_query": taken}
    expansion = (
        f"each query moved towards its {methods.expand} nearest images (α = {ALPHA:g}), itself "
        "never among them, and searched for again, exactly"
    )
    reranking = (
        f"the {RERANKED} nearest images ordered by k-reciprocal distance (k1 = {K1}, k2 = {K2}, "
        f"λ = {WEIGHT}) among these and the query, all others behind them"
    )
    if methods.expand:
        name = f"query expansion (α-QE, n = {methods.expand})"
        add(name, expansion, evaluate(**given, expand=methods.expand))
    if methods.rerank:
        name = f"k-reciprocal re-ranking ({K1}, {K2}, {WEIGHT})"
        add(name, reranking, evaluate(**given, rerank=True))
    if methods.expand and methods.rerank:
        both = evaluate(**given, expand=methods.expand, rerank=True)
        add("expansion, then re-ranking", f"{expansion}; then {reranking}", both)
    return rows


def _row(name: str, protocol: str, found: Evaluation, compared: Mapping[str, Any]) -> Row:
    held = spaced(len(compared["embeddings"]))
    who = f"each of {held} images against all others"
    if "queries" in compared:
        who = f"{spaced(len(compared['queries']))} queries against a gallery of {held} images"
    means = {key: value for key, value in found.mean().items() if key not in found.whole}
    return {"name": name, "protocol": f"{who}; {protocol}", "metrics": means}


def as_text(rows: Sequence[Row]) -> list[str]:
    """The table of all search methods, what was done, and what each takes."""
    columns = [name for name in rows[0]["metrics"] if name not in COUNTS]
    parts = [
        metrics_table({row["name"]: row["metrics"] for row in rows}, columns),
        "\n".join(wrap(f"{row['name']}: {row['protocol']}", then="  ") for row in rows),
    ]
    costs = [row for row in rows if "bytes_per_image" in row]
    if costs:
        lines = [f"{'':36}{'bytes per image':>17}{'ms per query':>14}"]
        lines += [
            f"{row['name']:36}{row['bytes_per_image']:17}{row['milliseconds_per_query']:14.3f}"
            for row in costs
        ]
        about = (
            f"Times: medians of {TIMED} queries at most, one at a time, scanned with NumPy on this "
            "CPU. For re-ranking the vectors are kept too; they may stay on disk."
        )
        parts += ["\n".join(lines), wrap(about)]
    return parts


def _bytes_per_image(compared: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the bytes of a vector, of its code, and of both."""
    vector, code = 4 * compared["embeddings"].shape[1], -(-compared["embeddings"].shape[1] // 8)
    return vector, code, vector + code


def _milliseconds_per_query(
    compared: Mapping[str, Any], candidates: int
) -> tuple[float, float, float]:
    """Return the median time to find the nearest by vectors, by codes, and by both together.

    One query at a time, by an exact scan on the CPU: what a search costs before any index.
    """
    gallery = _array(compared["embeddings"])
    queries = _array(compared.get("queries", compared["embeddings"])[:TIMED])
    squares = np.square(gallery).sum(1) if compared["similarity"] == "euclidean" else None
    codes, asked = _words(binary_codes(gallery)), _words(binary_codes(queries))

    def distances(query: Array, rows: Any = slice(None)) -> Array:
        found: Array = gallery[rows] @ query
        return -found if squares is None else np.asarray(squares[rows] - 2 * found)

    def by_vectors(number: int) -> Array:
        return _smallest(distances(queries[number]), FEWEST)

    def by_codes(number: int, count: int = FEWEST) -> Array:
        differing = _count_bits(codes ^ asked[number])
        return _smallest(differing.sum(1, dtype=np.int32), count)

    def by_both(number: int) -> Array:
        near = by_codes(number, candidates)
        return near[_smallest(distances(queries[number], near), FEWEST)]

    found = [_median(search, len(queries)) for search in (by_vectors, by_codes, by_both)]
    return found[0], found[1], found[2]


def _array(vectors: Any) -> Array:
    return np.ascontiguousarray(vectors.detach().cpu().numpy())


def _words(codes: Array) -> Array:
    """Eight bytes as one number, filled up with zeros."""
    filled = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))
    return np.ascontiguousarray(filled).view(np.uint64)


def _count_bits(words: Array) -> Array:
    if hasattr(np, "bitwise_count"):  # from NumPy 2 on
        return np.asarray(np.bitwise_count(words))
    return np.asarray(_BITS[words.view(np.uint8)])


_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1)


def _smallest(values: Array, count: int) -> Array:
    """Places of the smallest values, in their order."""
    if count < len(values):
        places = np.argpartition(values, count - 1)[:count]
        return places[np.argsort(values[places], kind="stable")]
    return np.argsort(values, kind="stable")


def _median(search: Callable[[int], Any], count: int) -> float:
    search(0)  # the first time pages are touched
    taken = []
    for number in range(count):
        started = time.perf_counter()
        search(number)
        taken.append(time.perf_counter() - started)
    return 1000 * median(taken)
