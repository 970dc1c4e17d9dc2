"""Classes that look like one, very small and very large classes; outliers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from proximetry._util.formatting import format_int, join_first, pluralize
from proximetry.health.embedded_images import EmbeddedImages
from proximetry.health.finding import Finding
from proximetry.search.outliers import MAX_DEVIATIONS, OUTLIER_NEIGHBORS, outlier_deviations

MIN_MIXING = 0.8  # 1: images of two classes are neighbors as often as if the classes were one
MIN_SHARE = 0.3  # of neighbors within the two classes
MIN_IMAGES = 5  # of a class that is compared with others
SMALL = 3  # images of a class; fewer are very small
LARGE = 10  # times the median
_EXAMPLES = 4


def similar_classes(images: EmbeddedImages) -> Iterator[Finding]:
    """Yield pairs of classes whose images are each other's neighbors as if they were one class."""
    sizes, names, k = images.class_sizes, images.catalog.class_names, images.neighbors.shape[1]
    keys = images.codes[:, None] * len(sizes) + images.neighbor_codes
    unique, totals = np.unique(keys, return_counts=True)
    counts = dict(zip(unique.tolist(), totals.tolist(), strict=True))
    for key in unique.tolist():
        a, b = divmod(key, len(sizes))
        if a >= b or min(sizes[a], sizes[b]) < MIN_IMAGES:
            continue
        mixing = []
        for one, other in ((a, b), (b, a)):
            own, cross = (counts.get(one * len(sizes) + c, 0) for c in (one, other))
            expected = sizes[other] / (sizes[one] + sizes[other] - 1)
            inside = own + cross >= MIN_SHARE * k * sizes[one]
            mixing.append(cross / max(1, own + cross) / expected if inside else 0.0)
        score = min(1.0, *mixing)
        if score >= MIN_MIXING:
            members = [np.flatnonzero(images.codes == c)[: _EXAMPLES // 2].tolist() for c in (a, b)]
            reason = (
                f"{names[a]} and {names[b]}: images of both classes are neighbors "
                f"{score:.0%} as often as within one class. Merge them if they are the same"
            )
            yield Finding("similar classes", (*members[0], *members[1]), reason, float(score))


def class_sizes(images: EmbeddedImages) -> Iterator[Finding]:
    """Yield one finding for very small classes, and one for very large ones."""
    sizes, names = images.class_sizes, images.catalog.class_names
    middle = float(np.median(sizes))
    for kind, mask, reason in (
        ("small classes", sizes < SMALL, f"fewer than {SMALL} images"),
        ("unbalanced classes", sizes > LARGE * middle, f"more than {LARGE} times the median"),
    ):
        if mask.any():
            codes = np.flatnonzero(mask)
            codes = codes[np.argsort(sizes[codes], kind="stable")]
            listed = [f"{names[code]} ({format_int(int(sizes[code]))})" for code in codes]
            count = pluralize(len(codes), "class")
            text = f"{count} of {format_int(len(sizes))} with {reason}: {join_first(listed)}"
            rows = [int(np.argmax(images.codes == code)) for code in codes[:_EXAMPLES]]
            yield Finding(kind, tuple(rows), text, float(mask.mean()) ** 0.5)


def outliers(images: EmbeddedImages) -> Iterator[Finding]:
    """Yield images that are unusually far from all others."""
    distances = 1 - images.cosines[:, :OUTLIER_NEIGHBORS].mean(1)
    deviations, usual_cosine = outlier_deviations(distances), 1 - float(np.median(distances))
    for number in np.flatnonzero(deviations > MAX_DEVIATIONS).tolist():
        cosine, nearest = float(images.cosines[number, 0]), int(images.neighbors[number, 0])
        reason = f"the nearest image has cosine {cosine:.2f}; usual are {usual_cosine:.2f}"
        score = max(0.05, 1 - MAX_DEVIATIONS / float(deviations[number]))
        yield Finding("outlier", (number, nearest), reason, score)
