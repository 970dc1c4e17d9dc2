"""Search methods that `proximetry evaluate` compares with plain search.

Binary codes, query expansion and k-reciprocal re-ranking: each has its row with its protocol.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError, spaced
from proximetry._util.types import Progress
from proximetry.cli.output import wrap
from proximetry.metrics import (
    Evaluation,
    Metrics,
    binary_codes,
    evaluate,
)
from proximetry.metrics.reranking import ALPHA, FEWEST, K1, K2, RERANKED, WEIGHT, candidates
from proximetry.metrics.scores import COUNTS
from proximetry.models.names import Similarity
from proximetry.training.reporting import metrics_table

TIMED = 100
"""Queries that are timed."""

Array = npt.NDArray[Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class SearchMethods:
    """The selected methods."""

    binary: bool
    expand: int
    rerank: bool

    def check(self, similarity: Similarity) -> None:
        """Reject methods that do not support this similarity."""
        if self.expand and similarity != "cosine":
            raise UsageError(f"--expand requires cosine similarity, got {similarity}")


def make_rows(
    methods: SearchMethods,
    plain: Evaluation,
    compared: Mapping[str, Any],
    metrics: Metrics,
    progress: Progress,
) -> list[Row]:
    """Return a row for each search method, the plain one first; nothing if there is no other."""
    if methods == SearchMethods(binary=False, expand=0, rerank=False):
        return []
    near, count = compared["similarity"], candidates(FEWEST)
    options: Any = {**compared, "metrics": metrics.of_lists(), "progress": progress}
    rows = [_row(f"vectors, {near}", f"float32 vectors, {near}, exact", plain, compared)]

    def add(name: str, protocol: str, evaluation: Evaluation) -> None:
        rows.append(_row(name, protocol, evaluation, compared))

    if methods.binary:
        signs = "sign of each dimension (bit 1 if positive), nothing fitted to these images"
        add(
            "binary codes, Hamming distance",
            f"{signs}; Hamming distance, exact, equal distances by index",
            evaluate(**options, binary=True),
        )
        add(
            f"binary codes, {count} re-ranked",
            f"{signs}; the {count} nearest by Hamming distance ordered by the {near} of their "
            "vectors, all others behind them",
            evaluate(**options, binary=True, candidates=count),
        )
        dim = compared["embeddings"].shape[1]
        vector, code = 4 * dim, -(-dim // 8)
        times = _milliseconds_per_query(compared, count)
        for row, size, taken in zip(rows, (vector, code, vector + code), times, strict=True):
            row |= {"bytes_per_image": size, "milliseconds_per_query": taken}
    expansion = (
        f"query expansion with {methods.expand} neighbors (α = {ALPHA:g}), without the query, then "
        "exact search"
    )
    reranking = (
        f"the {RERANKED} nearest images ordered by k-reciprocal distance (k1 = {K1}, k2 = {K2}, "
        f"λ = {WEIGHT}) among these and the query, all others behind them"
    )
    if methods.expand:
        name = f"query expansion (α-QE, n = {methods.expand})"
        add(name, expansion, evaluate(**options, expand=methods.expand))
    if methods.rerank:
        name = f"k-reciprocal re-ranking ({K1}, {K2}, {WEIGHT})"
        add(name, reranking, evaluate(**options, rerank=True))
    if methods.expand and methods.rerank:
        both = evaluate(**options, expand=methods.expand, rerank=True)
        add("expansion, then re-ranking", f"{expansion}; then {reranking}", both)
    return rows


def _row(name: str, protocol: str, evaluation: Evaluation, compared: Mapping[str, Any]) -> Row:
    count = spaced(len(compared["embeddings"]))
    who = f"each of {count} images against all others"
    if "queries" in compared:
        who = f"{spaced(len(compared['queries']))} queries against a gallery of {count} images"
    means = {key: value for key, value in evaluation.mean().items() if key not in evaluation.whole}
    return {"name": name, "protocol": f"{who}; {protocol}", "metrics": means}


def as_text(rows: Sequence[Row]) -> list[str]:
    """Return the table of all search methods, their protocols, and their costs."""
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
            "CPU. Re-ranking also needs the vectors, which may stay on disk."
        )
        parts += ["\n".join(lines), wrap(about)]
    return parts


def _milliseconds_per_query(
    compared: Mapping[str, Any], candidates: int
) -> tuple[float, float, float]:
    """Return the median time of an exact scan on the CPU by vectors, by codes, and by both."""
    gallery = np.ascontiguousarray(compared["embeddings"].detach().cpu().numpy())
    queries = compared.get("queries", compared["embeddings"])[:TIMED].detach().cpu().numpy()
    squares = np.square(gallery).sum(1) if compared["similarity"] == "euclidean" else None
    codes, query_codes = (_words(binary_codes(vectors)) for vectors in (gallery, queries))

    def distances(query: Array, rows: Any = slice(None)) -> Array:
        products: Array = gallery[rows] @ query
        return -products if squares is None else np.asarray(squares[rows] - 2 * products)

    def by_vectors(number: int) -> Array:
        return _smallest(distances(queries[number]), FEWEST)

    def by_codes(number: int, count: int = FEWEST) -> Array:
        differing = _count_bits(codes ^ query_codes[number])
        return _smallest(differing.sum(1, dtype=np.int32), count)

    def by_both(number: int) -> Array:
        near = by_codes(number, candidates)
        return near[_smallest(distances(queries[number], near), FEWEST)]

    def milliseconds(search: Callable[[int], Any]) -> float:
        search(0)  # touches the pages
        times = []
        for number in range(len(queries)):
            started = time.perf_counter()
            search(number)
            times.append(time.perf_counter() - started)
        return 1000 * median(times)

    return milliseconds(by_vectors), milliseconds(by_codes), milliseconds(by_both)


def _words(codes: Array) -> Array:
    """Pack eight bytes into one number, padded with zeros."""
    return np.ascontiguousarray(np.pad(codes, ((0, 0), (0, -codes.shape[1] % 8)))).view(np.uint64)


def _count_bits(words: Array) -> Array:
    if hasattr(np, "bitwise_count"):  # from NumPy 2 on
        return np.asarray(np.bitwise_count(words))
    return np.unpackbits(words.view(np.uint8), axis=1)


def _smallest(values: Array, count: int) -> Array:
    """Return the indices of the smallest values, rising."""
    rows = np.arange(len(values))
    if count < len(values):
        rows = np.argpartition(values, count - 1)[:count]
    return rows[np.argsort(values[rows], kind="stable")]
