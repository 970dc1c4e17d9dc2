"""Queries and gallery of a catalog, and whether they can be evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry.data import Catalog
from proximetry.metrics import Metrics, draw_pairs
from proximetry.models.constants import Similarity

Mask = npt.NDArray[np.bool_]


def choose_split(catalog: Catalog, split: str | None, source: str) -> tuple[Catalog, str]:
    """Return the rows of a split and its name; by default test if the catalog has it, else all."""
    if len(catalog) == 0:
        raise UsageError(f"{source} contains no images")
    name = split or ("test" if "test" in catalog.splits else "all")
    rows = catalog if name == "all" else catalog.filter(split=name)
    if len(rows) == 0:
        raise UsageError(f"{source} has no rows of split {name!r}. Try --split all.")
    return rows, name


def drop_unused_roles(catalog: Catalog) -> Catalog:
    """Drop roles that have no effect, since all images have both or none has any."""
    if catalog.queries is None or catalog.galleries is None:
        return catalog
    roles = np.concatenate(_roles(catalog))
    if roles.all() or not roles.any():
        return replace(catalog, queries=None, galleries=None)
    return catalog


def _roles(catalog: Catalog) -> tuple[Mask, Mask]:
    """Return which rows are queries and which are in the gallery."""
    if catalog.queries is None or catalog.galleries is None:
        return np.ones(len(catalog), bool), np.ones(len(catalog), bool)
    return np.asarray(catalog.queries, bool), np.asarray(catalog.galleries, bool)


def evaluation_arguments(
    vectors: Tensor,
    catalog: Catalog,
    similarity: Similarity,
    rows: Sequence[int] | npt.NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Return the arguments of `metrics.evaluate` for the embeddings of a catalog.

    All images against all, or the queries against the gallery. Row numbers exclude self-matches;
    for one process's share of a larger catalog, pass its row numbers there as ``rows``.
    """
    labels = np.asarray(catalog.labels)  # names: codes would differ between processes
    if catalog.queries is None:
        return {"embeddings": vectors, "labels": labels, "similarity": similarity}
    queries, gallery = _roles(catalog)
    numbers = np.arange(len(catalog)) if rows is None else np.asarray(rows)
    return {
        "embeddings": vectors[torch.from_numpy(gallery)],
        "labels": labels[gallery],
        "ignore_groups": numbers[gallery],
        "queries": vectors[torch.from_numpy(queries)],
        "query_labels": labels[queries],
        "query_ignore_groups": numbers[queries],
        "similarity": similarity,
    }


def explain_missing_positives(catalog: Catalog) -> str:
    """Return why no query has another image of its class in the gallery, "" if one has."""
    catalog = drop_unused_roles(catalog)
    queries, gallery = _roles(catalog)
    images = f"the {len(catalog)} images of {catalog.root}"
    for column, mask in (("query", queries), ("gallery", gallery)):
        if not mask.any():
            return (
                f"none of {images} has {column} set to true. Set the column {column}, or remove "
                "the columns query and gallery to compare all images"
            )
    gallery_counts = np.bincount(catalog.codes[gallery], minlength=len(catalog.class_names))
    if (gallery_counts[catalog.codes] - gallery)[queries].any():
        return ""
    if catalog.queries is not None:
        return (
            f"no query among {images} has another image of its class in the gallery. Correct the "
            "columns query, gallery and label"
        )
    return (
        f"{images} have {len(catalog.class_names)} classes of one image each. Evaluation needs "
        "classes of two images or more"
    )


def check_comparison(catalog: Catalog, metrics: Metrics) -> list[str]:
    """Reject images that cannot be evaluated; return notes on metrics that are always 100 %.

    Uses the catalog alone, before any image is read.

    Raises:
        ValueError: if no query has another image of its class, or a metric does not apply.
    """
    if reason := explain_missing_positives(catalog):
        raise ValueError(reason)
    catalog = drop_unused_roles(catalog)
    queries, gallery = _roles(catalog)
    if catalog.queries is not None and (metric := metrics.set_metric_names()):
        raise ValueError(
            f"{metric} needs one set, but {catalog.root} has queries and a gallery. Remove "
            f"{metric}, or the columns query and gallery."
        )
    if metrics.verification:
        try:
            draw_pairs(catalog.codes)
        except ValueError as error:
            raise ValueError(f"the images of {catalog.root}: {error}") from error
    size, notes = int(gallery.sum()) - bool(gallery[queries].all()), []
    if len(catalog.class_names) == 1:
        notes.append("all images are of one class: every neighbor is correct for any embedder")
    return notes + [
        f"recall@{k} is 100 % for any embedder: the gallery of a query has {size} images"
        for k in metrics.recall_at
        if k >= size
    ]
