"""Contact sheets: queries and their results as one HTML page or one PNG."""

import base64
import io
import math
import os
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jinja2 import Environment
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_path, atomic_write
from proximetry._util.formatting import shorten
from proximetry.data.images import ImageError, thumbnail
from proximetry.search.search_result import REMOVED, SearchResult

_THUMBNAIL, _MARGIN, _LINE = 160, 10, 15  # pixels
_COLUMNS = 10
_MAX_CELLS = 5_000  # most viewers do not open larger images
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # Pillow would break the line there, or draw boxes


class _Cell(NamedTuple):
    image: Any  # a source of `open_image`; None has no thumbnail
    lines: tuple[str, ...]  # below the image


def contact_sheet(file: Path, queries: Sequence[Any], result: SearchResult) -> None:
    """Write a contact sheet atomically.

    Args:
        file: a self-contained .html page, or a .png image.
        queries: the image of each query.
        result: the search results.
    """
    if file.suffix.lower() not in (".html", ".png"):
        raise UsageError(f"a contact sheet must end in .html or .png, got {file}")
    if len(queries) != len(result):
        raise UsageError(f"{len(queries)} queries for {len(result)} results")
    rows = _rows(queries, result)
    if file.suffix.lower() == ".html":
        atomic_write(file, _page(rows, "Search results", query=True))
        return
    with atomic_path(file) as part:
        _draw(rows).save(part, "PNG")


def draw_sheet(result: SearchResult) -> Image.Image:
    """Return the contact sheet of a search result."""
    return _draw(_rows(result.queries, result))


def group_sheet(file: Path, groups: Sequence[Sequence[str | None]], title: str) -> int:
    """Write groups of images as an HTML page, one row each; return the number of groups shown."""
    existing = [[path for path in group if path] for group in groups]  # None: removed since
    paths = [path for group in existing for path in group]
    root = os.path.commonpath(paths) if paths else ""
    sizes = np.cumsum([len(group) for group in existing])
    count = max(1, int((sizes <= _MAX_CELLS).sum()))
    rows = [
        [_Cell(path, (os.path.relpath(path, root),)) for path in group[:_MAX_CELLS]]
        for group in existing[:count]
    ]
    atomic_write(file, _page(rows, f"{title}: {len(rows)} of {len(groups)} groups", query=False))
    return len(rows)


def _rows(queries: Sequence[Any], result: SearchResult) -> list[list[_Cell]]:
    """Return the cells of every query and its results."""
    if len(queries) * (result.k + 1) > _MAX_CELLS:
        raise UsageError(
            f"contact sheet is too large: {len(queries)} × {result.k} images. "
            f"Use fewer queries or a smaller k, at most {_MAX_CELLS} images."
        )
    return [_cells(query, result, number) for number, query in enumerate(queries)]


def _cells(query: Any, result: SearchResult, number: int) -> list[_Cell]:
    name = os.path.basename(os.fspath(query)) if isinstance(query, str | os.PathLike) else ""
    cells = [_Cell(query, ("query", name))]
    for rank in range(result.k):
        if result.ids[number, rank] < 0:
            break
        path, label = result.paths[number, rank] or REMOVED, result.labels[number, rank]
        similarity = float(result.similarities[number, rank])
        score = f"{similarity if result.similarity == 'cosine' else -similarity:.4f}"
        if result.probabilities is not None:
            score += f" ({100 * result.probabilities[number, rank]:.0f} %)"
        name = os.path.basename(path)
        cells.append(_Cell(path, (f"{rank + 1}.  {score}", *([label] if label else []), name)))
    return cells


def _thumbnail(image: Any) -> Image.Image | None:
    if isinstance(image, Tensor):
        image = image.numpy(force=True)
    try:
        return None if image is None else thumbnail(image, _THUMBNAIL)
    except ImageError:
        return None


def _page(rows: Sequence[Sequence[_Cell]], title: str, *, query: bool) -> bytes:
    source = files("proximetry.search").joinpath("image_sheets.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    values = {"rows": rows, "title": title, "query": query, "data_uri": _data_uri}
    return environment.from_string(source).render(values).encode("utf-8", "replace")


def _data_uri(source: Any) -> str:
    image = _thumbnail(source)
    if image is None:
        return ""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _draw(results: Sequence[Sequence[_Cell]]) -> Image.Image:
    cells: dict[tuple[int, int], _Cell] = {}  # by row and column
    rows = 0
    for query, *matches in results:  # in several rows if there are many
        cells[rows, 0] = query
        for number, match in enumerate(matches):
            cells[rows + number // _COLUMNS, 1 + number % _COLUMNS] = match
        rows += max(1, math.ceil(len(matches) / _COLUMNS))
    columns = 1 + max(column for _, column in cells)
    side, height = _THUMBNAIL + _MARGIN, _THUMBNAIL + 3 * _LINE + 2 * _MARGIN
    sheet = Image.new("RGB", (columns * side + 2 * _MARGIN, rows * height + _MARGIN), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for (row, column), cell in cells.items():
        # A second margin separates queries from results.
        left, top = _MARGIN + column * side + _MARGIN * (column > 0), _MARGIN + row * height
        image = _thumbnail(cell.image)
        if image is None:
            draw.rectangle((left, top, left + _THUMBNAIL, top + _THUMBNAIL), outline="#bbb")
            text = "a vector" if cell.image is None else "not readable"
            draw.text((left + 40, top + _THUMBNAIL // 2), text, "#777", font)
        else:
            x, y = (_THUMBNAIL - image.width) // 2, (_THUMBNAIL - image.height) // 2
            sheet.paste(image, (left + x, top + y))
        if column == 0:
            frame = (left - 3, top - 3, left + _THUMBNAIL + 2, top + _THUMBNAIL + 2)
            draw.rectangle(frame, outline="#3366cc", width=2)
        for number, line in enumerate(cell.lines):
            text = _CONTROL.sub(" ", line.encode("utf-8", "replace").decode())
            while draw.textlength(text, font) > _THUMBNAIL:
                text = shorten(text, len(text.replace("…", "")) - 1)
            color = "#777" if number == len(cell.lines) - 1 else "black"
            draw.text((left, top + _THUMBNAIL + 4 + number * _LINE), text, color, font)
    return sheet
