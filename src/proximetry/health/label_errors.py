"""Probable label errors as findings."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from proximetry.health.embedded_images import EmbeddedImages
from proximetry.health.finding import Finding
from proximetry.metrics.label_model import LabelModel

MIN_PROBABILITY = 0.5  # that a label is wrong
MIN_CONFIDENCE = 0.7  # in the best class; else the image is dropped
_VOTES = 5
_EXAMPLES = 3


def label_findings(images: EmbeddedImages, labels: LabelModel) -> Iterator[Finding]:
    """Yield the images whose label is probably wrong."""
    names = images.catalog.class_names
    for number in np.flatnonzero(labels.wrong > MIN_PROBABILITY).tolist():
        best, name = int(labels.best[number]), names[labels.best[number]]
        nearest = images.neighbor_codes[number, :_VOTES]
        votes = int((nearest == best).sum())
        own = int((nearest == images.codes[number]).sum())
        reason = f"{votes} of {len(nearest)} nearest images are {name}"
        reason += f", {own} are {images.catalog.labels[number]}" if own else ""
        alike = images.neighbors[number][images.neighbor_codes[number] == best]
        rows = (number, *alike[:_EXAMPLES].tolist())
        score = float(labels.wrong[number])
        if labels.confidence[number] >= MIN_CONFIDENCE:
            yield Finding("label error", rows, reason, score, "relabel", name)
        else:
            reason += f"; perhaps {name}" if not votes else ""
            yield Finding("label error", rows, reason, score, "drop")
