"""Contact sheets: queries and what was found for them, as one HTML page or one PNG."""

import base64
import html
import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from proximetry._common import UsageError, atomic_path, atomic_write, chunks, shorten
from proximetry.data.images import ImageError, thumbnail
from proximetry.search.result import REMOVED, SearchResult

THUMBNAIL = 160
_MARGIN, _LINE = 10, 15
_COLUMNS = 10
# More pixels than a picture can show, or than viewers open.
_MOST_CELLS = 5_000
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")  # which Pillow would break the line at, or draw as boxes

_STYLE = """
:root { color-scheme: light dark; font: 14px/1.35 system-ui, sans-serif; }
body { margin: 1.5rem; }
section { margin-bottom: 2rem; }
.row { display: flex; flex-wrap: wrap; gap: .75rem; }
figure { margin: 0; width: 160px; }
figure.query { margin-right: 1.25rem; }
.picture { width: 160px; height: 160px; display: grid; place-items: center;
  background: #8881; border-radius: 4px; overflow: hidden; }
.query .picture { outline: 2px solid #36c; }
img { max-width: 160px; max-height: 160px; }
figcaption { overflow-wrap: anywhere; margin-top: .25rem; }
.small { color: #777; font-size: 12px; }
"""


class _Cell(NamedTuple):
    """A picture and the lines below it."""

    path: str
    lines: tuple[str, ...]


def contact_sheet(file: Path, queries: Sequence[str], result: SearchResult) -> None:
    """Write a contact sheet, all or nothing: .html needs no other file, .png is a picture.

    Args:
        file: ends in .html or .png.
        queries: the image file of each query.
        result: what was found for them.
    """
    if file.suffix not in (".html", ".png"):
        raise UsageError(f"a contact sheet must end in .html or .png, got {file}")
    if len(queries) != len(result):
        raise UsageError(f"{len(queries)} queries for {len(result)} results")
    if len(queries) * (result.k + 1) > _MOST_CELLS:
        raise UsageError(
            f"a contact sheet of {len(queries)} × {result.k} images is too large to look at; "
            f"take fewer queries or a smaller k, up to {_MOST_CELLS} images in all"
        )
    rows = [_cells(query, result, number) for number, query in enumerate(queries)]
    if file.suffix == ".html":
        atomic_write(file, _page(rows, "Search results", query=True))
        return
    with atomic_path(file) as part:
        _picture(rows).save(part, "PNG")


def group_sheet(file: Path, groups: Sequence[Sequence[str | None]]) -> int:
    """Write groups of images as an HTML page, one row each; return the number of groups shown."""
    there = [[path for path in group if path] for group in groups]  # None: removed meanwhile
    paths = [path for group in there for path in group]
    home = os.path.commonpath(paths) if paths else ""
    sizes = np.cumsum([len(group) for group in there])
    count = max(1, int((sizes <= _MOST_CELLS).sum()))
    rows = [
        [_Cell(path, (os.path.relpath(path, home),)) for path in group[:_MOST_CELLS]]
        for group in there[:count]
    ]
    title = f"Duplicates: {len(rows)} of {len(groups)} groups"
    atomic_write(file, _page(rows, title, query=False))
    return len(rows)


def _cells(query: str, result: SearchResult, number: int) -> list[_Cell]:
    cells = [_Cell(query, ("query", os.path.basename(query)))]
    for rank in range(result.k):
        if result.ids[number, rank] < 0:
            break
        path, label = result.paths[number, rank] or REMOVED, result.labels[number, rank]
        near = float(result.similarities[number, rank])
        score = f"{near:.4f}" if result.similarity == "cosine" else f"{-near:.4f}"
        name = os.path.basename(path)
        cells.append(_Cell(path, (f"{rank + 1}.  {score}", *([label] if label else []), name)))
    return cells


def _thumbnail(path: str) -> Image.Image | None:
    """A small version of an image, None for one that cannot be read any more."""
    try:
        return thumbnail(path, THUMBNAIL)
    except ImageError:
        return None


def _page(rows: Sequence[Sequence[_Cell]], title: str, *, query: bool) -> bytes:
    sections = []
    for cells in rows:
        figures = "\n".join(_figure(cell, first=query and i == 0) for i, cell in enumerate(cells))
        sections.append(f'<section><div class="row">\n{figures}\n</div></section>')
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )
    return page.encode("utf-8", "replace")


def _figure(cell: _Cell, *, first: bool) -> str:
    image = _thumbnail(cell.path)
    shown = '<span class="small">not readable</span>'
    if image is not None:
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=85)
        data = base64.b64encode(buffer.getvalue()).decode()
        shown = f'<img src="data:image/jpeg;base64,{data}" alt="{html.escape(cell.lines[-1])}">'
    *lines, name = (html.escape(line) for line in cell.lines)
    told = "<br>".join(lines)
    return (
        f'<figure{" class=query" if first else ""}><div class="picture">{shown}</div>'
        f'<figcaption title="{html.escape(cell.path)}">{told}'
        f'<div class="small">{name}</div></figcaption></figure>'
    )


def _lines(cells: Sequence[_Cell]) -> list[list[_Cell | None]]:
    """The query with what was found beside it, in several lines if that is much."""
    query, *found = cells
    parts = [found[part] for part in chunks(len(found), _COLUMNS)] or [[]]
    return [[query if i == 0 else None, *part] for i, part in enumerate(parts)]


def _picture(found: Sequence[Sequence[_Cell]]) -> Image.Image:
    font = ImageFont.load_default(12)
    side, height = THUMBNAIL + _MARGIN, THUMBNAIL + 3 * _LINE + 2 * _MARGIN
    rows = [line for cells in found for line in _lines(cells)]
    columns = max(map(len, rows))
    sheet = Image.new("RGB", (columns * side + 2 * _MARGIN, len(rows) * height + _MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for row, cells in enumerate(rows):
        for column, cell in enumerate(cells):
            if cell is None:
                continue
            # The query stands a little apart.
            left, top = _MARGIN + column * side + _MARGIN * (column > 0), _MARGIN + row * height
            image = _thumbnail(cell.path)
            if image is None:
                draw.rectangle((left, top, left + THUMBNAIL, top + THUMBNAIL), outline="#bbb")
                draw.text((left + 40, top + THUMBNAIL // 2), "not readable", "#777", font)
            else:
                place = (THUMBNAIL - image.width) // 2, (THUMBNAIL - image.height) // 2
                sheet.paste(image, (left + place[0], top + place[1]))
            if column == 0:
                draw.rectangle(
                    (left - 3, top - 3, left + THUMBNAIL + 2, top + THUMBNAIL + 2),
                    outline="#3366cc",
                    width=2,
                )
            for number, line in enumerate(cell.lines):
                text = _CONTROL.sub(" ", line.encode("utf-8", "replace").decode())
                while draw.textlength(text, font) > THUMBNAIL:
                    text = shorten(text, len(text.replace("…", "")) - 1)
                color = "#777" if number == len(cell.lines) - 1 else "black"
                draw.text((left, top + THUMBNAIL + 4 + number * _LINE), text, color, font)
    return sheet
