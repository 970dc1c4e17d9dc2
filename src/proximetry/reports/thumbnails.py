"""Thumbnails embedded in a page."""

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from proximetry._util.machine import cores
from proximetry.data.images import ImageError, thumbnail

SIDE = 128  # longer side of a thumbnail in pixels
TILE = 48  # side of a tile in the sprite of a map
COLUMNS = 50


def load_thumbnail(file: str, side: int = SIDE) -> Image.Image | None:
    """Return a thumbnail of an image; None if it is not readable."""
    try:
        return thumbnail(file, side)
    except ImageError:
        return None


def sprite(files: Sequence[str]) -> str:
    """Return the thumbnails of many files as one image with `COLUMNS` columns, as a data URI."""
    rows = -(-len(files) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * TILE, rows * TILE), "#888")
    with ThreadPoolExecutor(cores()) as pool:
        for number, image in enumerate(pool.map(lambda file: load_thumbnail(file, TILE), files)):
            if image is not None:
                left, top = number % COLUMNS * TILE, number // COLUMNS * TILE
                free = (TILE - image.width) // 2, (TILE - image.height) // 2
                sheet.paste(image, (left + free[0], top + free[1]))
    return data_uri(sheet, quality=60)


def data_uri(image: Image.Image, quality: int = 75) -> str:
    """Return an image as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=quality)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
