"""How similar altered copies of a gallery's images are: the default threshold of `duplicates`."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance, ImageOps

from proximetry._util.errors import Steps
from proximetry.data import ImageError, open_image
from proximetry.models import Embedder
from proximetry.search.snapshot import Version, prepared

SAMPLE = 50
# This share of altered copies may be less similar than the threshold.
_MISSED = 0.1
# Neighbors that are nearer than usual by this many robust standard deviations are exceptional.
_DEVIATIONS = 2.0
# Images are decoded at up to twice this size, which is enough for networks.
_SIDE = 512


class Measured(NamedTuple):
    """What altered copies and different images reach, as `Version.search` scores them.

    Attributes:
        copies: the score that 90 % of the altered copies reach.
        others: the score that few different images reach; −inf for a single image.
        images: number of images that were altered.
    """

    copies: float
    others: float
    images: int


def altered_copies(image: Image.Image) -> list[Image.Image]:
    """Return an image at half size, recompressed, mirrored, brightened and cropped."""
    width, height = image.size
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=40)
    return [
        image.resize((max(1, width // 2), max(1, height // 2))),
        open_image(stream.getvalue()),
        ImageOps.mirror(image),
        ImageEnhance.Brightness(image).enhance(1.2),
        image.crop((width // 20, height // 20, width - width // 20, height - height // 20)),
    ]


def measure(now: Version, embedder: Callable[[], Embedder], steps: Steps) -> Measured | None:
    """Compare a sample of the images with altered copies and with their neighbors.

    Returns None where no image can be read.
    """
    everything = now.select({})
    places = now.chosen(everything)
    draw = np.random.default_rng(0)
    places = np.sort(draw.choice(places, min(SAMPLE, len(places)), replace=False))
    originals: list[int] = []
    copies: list[Image.Image] = []
    for place, path in zip(places.tolist(), now.take(places, ["path"])["path"], strict=True):
        with suppress(ImageError):
            more = altered_copies(open_image(path, size=_SIDE))
            copies += more
            originals += [place] * len(more)
    if not copies:
        return None
    vectors = embedder().encode(
        copies,
        progress=lambda done: steps("embedding altered copies", done, len(copies)),
    )
    queries = prepared(vectors.numpy(), now.manifest)
    scores = now.store.scores(queries, np.array(originals)[:, None])
    near = now.search(now.store.take(places), 2, everything).scores
    best = 1.0 if now.manifest.similarity == "cosine" else 0.0
    others = best - _unusually_near(best - near[:, -1]) if len(near) > 1 else -np.inf
    return Measured(float(np.quantile(scores, _MISSED)), others, len({*originals}))


def _unusually_near(distances: npt.NDArray[np.floating[Any]]) -> float:
    """The distance that few nearest neighbors fall below, whether or not some are copies.

    Distances are compared by their logarithms. Median and median absolute deviation change
    little while fewer than half of the images have copies.
    """
    logs = np.log(np.maximum(distances, 1e-7))
    middle = np.median(logs)
    return float(np.exp(middle - _DEVIATIONS * 1.4826 * np.median(np.abs(logs - middle))))
