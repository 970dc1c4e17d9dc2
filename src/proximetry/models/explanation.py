"""`Explanation`: contributions of image positions to the cosine of two images."""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Array = npt.NDArray[np.float64]
Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels of an image."""

_REGION = 4  # regions have a quarter of the sides
_MARGIN, _GAP, _LINE = 12, 48, 24  # pixels of a drawing
_COLORS = ("#e6194b", "#0b84e3", "#2f9e44", "#9333ea", "#c2740a", "#0e7c86", "#7a4419", "#52525b")
_HEAT = ((0.0, 0.35, 0.7, 1.0), ((90, 90, 90), (255, 221, 87), (255, 120, 0), (214, 0, 28)))
_COLD = (40, 90, 220)


class Match(NamedTuple):
    """Two similar regions.

    Attributes:
        a: box in the first image.
        b: box in the second image.
        contribution: what the positions of both regions together add to the similarity.
    """

    a: Box
    b: Box
    contribution: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """The cosine of two images as a sum over their positions; see `Embedder.explain`.

    Attributes:
        vectors: of each image, a vector per position, [h, w, dim]; their sum is its embedding, of
            unit length.
        images: both images, upright.
        boxes: the part of each image that the network sees, in its pixels.
    """

    vectors: tuple[Array, Array]
    images: tuple[Image.Image, Image.Image]
    boxes: tuple[Box, Box]

    @cached_property
    def contributions(self) -> tuple[Array, Array]:
        """For each image, the contribution of each position [h, w]; their sum is the cosine."""
        a, b = self.vectors
        return a @ b.sum((0, 1)), b @ a.sum((0, 1))

    @property
    def similarity(self) -> float:
        """The cosine."""
        return float(self.contributions[0].sum())

    @cached_property
    def pairs(self) -> Array:
        """The contribution of each pair of positions [h · w, h · w], row by row of the maps."""
        a, b = (vectors.reshape(-1, vectors.shape[-1]) for vectors in self.vectors)
        return a @ b.T

    def matches(self, count: int = 3) -> list[Match]:
        """Return up to `count` pairs of regions that contribute most, largest first.

        A region has a quarter of the height and the width that the network sees. Regions of one
        image do not overlap.
        """
        rows, columns, _ = self.vectors[0].shape
        size = max(1, round(rows / _REGION)), max(1, round(columns / _REGION))
        corners = np.array([*product(range(rows - size[0] + 1), range(columns - size[1] + 1))])
        windows = np.lib.stride_tricks.sliding_window_view
        a, b = (
            windows(vectors, size, (0, 1)).sum((3, 4)).reshape(len(corners), -1)
            for vectors in self.vectors
        )
        scores, found = a @ b.T, list[Match]()
        while len(found) < count and (best := scores.max()) > 0:
            first, second = np.unravel_index(scores.argmax(), scores.shape)
            boxes = [
                self._box(number, corners[region], size)
                for number, region in enumerate((first, second))
            ]
            found.append(Match(boxes[0], boxes[1], float(best)))
            near = [(abs(corners - corners[one]) < size).all(1) for one in (first, second)]
            scores[near[0]] = scores[:, near[1]] = -np.inf
        return found

    def _box(self, number: int, corner: Any, size: tuple[int, int]) -> Box:
        """Return the box of positions in the pixels of an image."""
        left, top, right, bottom = self.boxes[number]
        rows, columns, _ = self.vectors[number].shape
        width, height = (right - left) / columns, (bottom - top) / rows
        x, y = left + float(corner[1]) * width, top + float(corner[0]) * height
        return x, y, x + size[1] * width, y + size[0] * height

    def place(self, number: int, box: Box) -> str:
        """Return where a box is in the part of an image that the network sees: "top left"."""
        left, top, right, bottom = self.boxes[number]
        x = ((box[0] + box[2]) / 2 - left) / (right - left)
        y = ((box[1] + box[3]) / 2 - top) / (bottom - top)
        words = ("top", "", "bottom")[int(3 * y)], ("left", "", "right")[int(3 * x)]
        return " ".join(filter(None, words)) or "center"

    def image(self, count: int = 3, *, side: int = 448) -> Image.Image:
        """Return both images as the network sees them, with their contributions as colors.

        Yellow to red positions add to the similarity, blue ones reduce it; both images have the
        same scale. Numbers connect the strongest matching regions.

        Args:
            count: number of matching regions.
            side: height of the images in pixels.
        """
        limit = max(float(np.abs(values).max()) for values in self.contributions) or 1.0
        panels = [self._panel(number, side, limit) for number in (0, 1)]
        lefts = _MARGIN, _MARGIN + panels[0].width + _GAP
        top = _MARGIN + _LINE
        width = lefts[1] + panels[1].width + _MARGIN
        picture = Image.new("RGB", (width, top + side + _MARGIN), "white")
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default(15)
        draw.text((_MARGIN, _MARGIN - 2), f"cosine {self.similarity:.4f}", "black", font)
        for panel, left in zip(panels, lefts, strict=True):
            picture.paste(panel, (left, top))
        drawn = [
            [self._place(box, n, (lefts[n], top), side) for n, box in enumerate((match.a, match.b))]
            for match in self.matches(count)
        ]
        for number, (one, other) in enumerate(drawn):  # at different heights of equal rows
            part = (number + 1) / (len(drawn) + 1)
            start, end = (box[1] + part * (box[3] - box[1]) for box in (one, other))
            draw.line((one[2], start, other[0], end), _COLORS[number % len(_COLORS)], width=2)
        for number, boxes in enumerate(drawn):
            for box in boxes:
                color, (x, y) = _COLORS[number % len(_COLORS)], box[:2]
                draw.rectangle(box, outline=color, width=3)
                draw.rectangle((x, y, x + 20, y + 20), fill=color)
                draw.text((x + 10, y + 10), f"{number + 1}", "white", font, "mm")
        return picture

    def heat_map(self, number: int = 1, *, side: int = 224) -> Image.Image:
        """Return one of the images as in `image`, without regions: 0 is the first, 1 the second."""
        limit = float(np.abs(self.contributions[number]).max()) or 1.0
        return self._panel(number, side, limit)

    def _place(self, box: Box, number: int, corner: tuple[int, int], side: int) -> Box:
        """Return a box of an image in the pixels of a drawing, whose image begins at `corner`."""
        left, top, _, _ = visible = self.boxes[number]
        scale = side / _height(visible)
        x, y = corner[0] - left * scale, corner[1] - top * scale
        return (
            box[0] * scale + x,
            box[1] * scale + y,
            box[2] * scale + x - 1,
            box[3] * scale + y - 1,
        )

    def _panel(self, number: int, side: int, limit: float) -> Image.Image:
        """Return an image as the network sees it, with its contributions as colors."""
        box = self.boxes[number]
        size = round(side * (box[2] - box[0]) / _height(box)), side
        image = self.images[number].resize(size, Image.Resampling.BICUBIC, box)
        values = Image.fromarray((self.contributions[number] / limit).astype(np.float32))
        heat = np.asarray(values.resize(size, Image.Resampling.BICUBIC))
        heat = heat.clip(*values.getextrema())
        channels = [np.interp(heat, _HEAT[0], values) for values in zip(*_HEAT[1], strict=True)]
        color = np.where(heat[..., None] < 0, _COLD, np.stack(channels, -1))
        opacity = (0.75 * np.abs(heat) ** 0.7)[..., None]
        mixed = (1 - opacity) * np.asarray(image) + opacity * color
        return Image.fromarray(mixed.round().astype(np.uint8))


def _height(box: Box) -> float:
    return box[3] - box[1]
