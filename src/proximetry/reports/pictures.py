"""Small versions of images, inside a page."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from proximetry._common import cores
from proximetry.data.images import ImageError, thumbnail
from proximetry.reports.markup import Markup, data_uri, el

SIDE = 128
"""Pixels of a picture's longer side at most, whatever the image has."""
TILE = 48
"""Of the pictures that a map shows, all of which are one image."""
COLUMNS = 50


class Pictures:
    """Pictures for a page; counts those whose image cannot be read any more."""

    def __init__(self) -> None:
        self.unreadable = 0

    def show(self, file: str, about: str, instead: str | None = None) -> Markup:
        """An image as an element; a frame that says so where it cannot be read.

        With ``instead``, which the frame says then, there need not be an image.
        """
        image = _small(file, SIDE)
        if image is None:
            self.unreadable += instead is None
            said = instead or "not readable"
            return el("span", said, class_="gone", role="img", aria_label=about)
        return el(
            "img",
            src=_encoded(image),
            alt=about,
            width=image.width,
            height=image.height,
            loading="lazy",
        )


def sprite(files: Sequence[str]) -> str:
    """Many small pictures in rows of `COLUMNS` as one image, given as an address."""
    rows = -(-len(files) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * TILE, rows * TILE), "#888")
    with ThreadPoolExecutor(cores()) as pool:
        for number, image in enumerate(pool.map(lambda file: _small(file, TILE), files)):
            if image is not None:
                left, top = number % COLUMNS * TILE, number // COLUMNS * TILE
                free = (TILE - image.width) // 2, (TILE - image.height) // 2
                sheet.paste(image, (left + free[0], top + free[1]))
    return _encoded(sheet, quality=60)


def _small(file: str, side: int) -> Image.Image | None:
    try:
        return thumbnail(file, side)
    except ImageError:
        return None


def _encoded(image: Image.Image, quality: int = 75) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality)
    return data_uri(buffer.getvalue(), "image/webp")
