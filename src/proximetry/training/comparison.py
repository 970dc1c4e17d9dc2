"""Who is compared with whom: the queries and the gallery of a catalogue, row by row."""

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
from proximetry.models.names import Similarity

Mask = npt.NDArray[np.bool_]


def choose_split(catalog: Catalog, split: str | None, source: str) -> tuple[Catalog, str]:
    """Return the rows of a split: as asked, else test if there are such, else all."""
    if len(catalog) == 0:
        raise UsageError(f"{source} holds no images")
    chosen = split or ("test" if "test" in catalog.splits else "all")
    found = catalog if chosen == "all" else catalog.filter(split=chosen)
    if len(found) == 0:
        raise UsageError(f"{source} has no rows of split {chosen!r}; try --split all")
    return found, chosen


def with_needed_roles(catalog: Catalog) -> Catalog:
    """Leave out roles that say nothing: then all images are compared with all others.

    So it is where every image is a query and in the gallery, and where none has a role, as in the
    training classes of a dataset that prescribes roles for its test set.
    """
    if catalog.queries is None or catalog.galleries is None:
        return catalog
    roles = np.concatenate(_roles(catalog))
    if roles.all() or not roles.any():
        return replace(catalog, queries=None, galleries=None)
    return catalog


def _roles(catalog: Catalog) -> tuple[Mask, Mask]:
    if catalog.queries is None or catalog.galleries is None:
        return np.ones(len(catalog), bool), np.ones(len(catalog), bool)
    return np.asarray(catalog.queries, bool), np.asarray(catalog.galleries, bool)


def compared(
    vectors: Tensor,
    catalog: Catalog,
    similarity: Similarity,
    rows: Sequence[int] | npt.NDArray[np.int64] | None = None,
) -> dict[str, Any]:
    """Return the arguments by which the metrics compare a catalogue's embeddings.

    All images against all, or the catalogue's queries against its gallery. An image may be both:
    the number of its row goes with it, and it never meets itself.

    Args:
        vectors: the embeddings, one for each row of the catalogue.
        catalog: the images, with the roles they need (`with_needed_roles`).
        similarity: how embeddings are compared.
        rows: the number of each row, where the catalogue is one process's share of a larger one.
    """
    labels = np.asarray(catalog.labels)  # names, since codes would differ between processes
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


def nothing_to_find(catalog: Catalog) -> str:
    """Say why no query of a catalogue could find an image of its class, and what to do, if so."""
    catalog = with_needed_roles(catalog)
    queries, gallery = _roles(catalog)
    images = f"the {len(catalog)} images of {catalog.root}"
    for column, mask in (("query", queries), ("gallery", gallery)):
        if not mask.any():
            return (
                f"none of {images} is marked as {column}: set the column {column} to true where "
                "it should be, or leave out the columns query and gallery to compare all with all"
            )
    found = np.bincount(catalog.codes[gallery], minlength=len(catalog.class_names))[catalog.codes]
    if (found - gallery)[queries].any():
        return ""
    if catalog.queries is not None:
        return (
            f"among {images} no query has another image of its class in the gallery, so there "
            "is nothing to find; correct the columns query, gallery and label"
        )
    return (
        f"{images} are of {len(catalog.class_names)} classes, one image each, so there is "
        "nothing to find; evaluation needs classes of two images or more"
    )


def check_comparison(catalog: Catalog, wanted: Metrics) -> list[str]:
    """Refuse images on which nothing can be measured; return notes on metrics that say nothing.

    Goes by the catalogue alone, before any image is read.

    Raises:
        ValueError: if no query could find an image of its class, and why.
    """
    reason = nothing_to_find(catalog)
    if reason:
        raise ValueError(reason)
    catalog = with_needed_roles(catalog)
    queries, gallery = _roles(catalog)
    whole = wanted.one_set()
    if catalog.queries is not None and whole:
        raise ValueError(
            f"{whole} takes one set, but the {len(catalog)} images of {catalog.root} are "
            f"divided into queries and a gallery: leave {whole} out, or the columns query and "
            "gallery"
        )
    if wanted.verification:
        try:
            draw_pairs(catalog.codes)
        except ValueError as error:
            raise ValueError(f"the images of {catalog.root}: {error}") from error
    most = int(gallery.sum()) - bool(gallery[queries].all())
    one = "what is nearest is right for any embedder: all images are of one class"
    return [one] * (len(catalog.class_names) == 1) + [
        f"recall@{k} is 100 % for any embedder: a query can find no more than {most} images"
        for k in wanted.recall_at
        if k >= most
    ]
