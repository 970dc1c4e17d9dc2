"""Search methods that `proximetry evaluate` compares with plain search.

Binary codes, query expansion and k-reciprocal re-ranking; each is a row with its protocol.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from proximetry._util.formatting import format_int
from proximetry._util.types import Progress
from proximetry.cli.output import wrap
from proximetry.metrics import Evaluation, Metrics, evaluate
from proximetry.metrics.reranking import ALPHA, K1, K2, MIN_K, RERANKED, WEIGHT, num_candidates
from proximetry.metrics.scores import COUNTS
from proximetry.training.metrics_table import metrics_table

Row = dict[str, Any]


def make_rows(
    plain: Evaluation,
    arguments: Mapping[str, Any],
    metrics: Metrics,
    progress: Progress,
    *,
    binary: bool,
    expand: int,
    rerank: bool,
) -> list[Row]:
    """Return a row per search method, plain search first; empty if there is no other method."""
    similarity, count = arguments["similarity"], num_candidates(MIN_K)
    signs = "sign of each dimension (bit 1 if positive), not fitted to these images"
    expansion = (
        f"query expansion with {expand} neighbors (α = {ALPHA:g}), without the query, then "
        "exact search"
    )
    reranking = (
        f"the {RERANKED} nearest images ordered by k-reciprocal distance (k1 = {K1}, k2 = {K2}, "
        f"λ = {WEIGHT}) among these and the query, followed by all others"
    )
    # Name, protocol and additional arguments of `evaluate`.
    methods: list[tuple[str, str, dict[str, Any]]] = []
    if binary:
        hamming = f"{signs}; Hamming distance, exact, ties broken by index"
        ordered = (
            f"{signs}; the {count} nearest by Hamming distance ordered by the {similarity} of "
            "their vectors, followed by all others"
        )
        methods.append(("binary codes, Hamming distance", hamming, {"binary": True}))
        both = {"binary": True, "candidates": count}
        methods.append((f"binary codes, {count} re-ranked", ordered, both))
    if expand:
        methods.append((f"query expansion (α-QE, n = {expand})", expansion, {"expand": expand}))
    if rerank:
        name = f"k-reciprocal re-ranking ({K1}, {K2}, {WEIGHT})"
        methods.append((name, reranking, {"rerank": True}))
    if expand and rerank:
        both = {"expand": expand, "rerank": True}
        methods.append(("expansion, then re-ranking", f"{expansion}; then {reranking}", both))
    if not methods:
        return []
    options: Any = {**arguments, "metrics": metrics.per_query_only(), "progress": progress}
    protocol = f"float32 vectors, {similarity}, exact"
    rows = [_row(f"vectors, {similarity}", protocol, plain, arguments)]
    for name, protocol, extra in methods:
        rows.append(_row(name, protocol, evaluate(**options, **extra), arguments))
    if binary:
        dim = arguments["embeddings"].shape[1]
        vector, code = 4 * dim, -(-dim // 8)
        for row, size in zip(rows, (vector, code, vector + code), strict=False):
            row["bytes_per_image"] = size
    return rows


def _row(name: str, protocol: str, evaluation: Evaluation, arguments: Mapping[str, Any]) -> Row:
    images = f"{format_int(len(arguments['embeddings']))} images"
    pairs = f"each of {images} against all others"
    if "queries" in arguments:
        pairs = f"{format_int(len(arguments['queries']))} queries against a gallery of {images}"
    means = {key: value for key, value in evaluation.items() if key not in evaluation.set_scores}
    return {"name": name, "protocol": f"{pairs}; {protocol}", "metrics": means}


def as_text(rows: Sequence[Row]) -> list[str]:
    """Return the table of all search methods, and their protocols and costs."""
    columns = [name for name in rows[0]["metrics"] if name not in COUNTS]
    lines = []
    for row in rows:
        size = row.get("bytes_per_image")
        cost = "" if size is None else f"; {size} bytes per image"
        lines.append(wrap(f"{row['name']}: {row['protocol']}{cost}", subsequent_indent="  "))
    table = metrics_table({row["name"]: row["metrics"] for row in rows}, columns)
    return [table, "\n".join(lines)]
