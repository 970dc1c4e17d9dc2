"""`proximetry duplicates`: find near-duplicate images in a gallery."""

import os
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write
from proximetry._util.formatting import format_int, format_value, pluralize
from proximetry.cli.inputs import open_gallery
from proximetry.cli.options import AsJson, GalleryAddress
from proximetry.cli.output import check_out, print_result, progress_bar, relative_path
from proximetry.search.manifest import GALLERY


def duplicates(
    gallery: GalleryAddress = GALLERY,
    *,
    threshold: float | None = None,
    to_remove: Path | None = None,
    sheet: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find near-duplicate images in a gallery.

    Args:
        threshold: minimum cosine, or maximum Euclidean distance, of a pair; default: estimated
            from altered copies of a sample of the images.
        to_remove: also write a .txt file with one path per line: the files of every group but the
            largest, or of equal sizes the one added first.
        sheet: also write the groups as a self-contained .html page.
    """
    check_out(sheet, [".html"], option="--sheet")
    check_out(to_remove, [".txt"], option="--to-remove")
    opened = open_gallery(gallery, None)
    with progress_bar("comparing") as progress:
        result = opened.duplicates(threshold, progress=progress)
    pairs = list(zip(result.pairs.tolist(), result.similarities.tolist(), strict=True))
    groups = [[result.paths[int(row)] for row in group] for group in result.groups]
    document: dict[str, Any] = {
        "gallery": gallery,
        "images": len(opened),
        "threshold": round(result.threshold, 6),
        "threshold_source": result.threshold_source or "option",
        "groups": groups,
        "pairs": [
            {"ids": ids, "paths": [result.paths[i] for i in ids], "similarity": round(value, 6)}
            for ids, value in pairs
        ],
    }
    lines = [f"threshold: {result.threshold_source}"] if result.threshold_source else []
    for group, paths in zip(result.groups, groups, strict=True):
        lowest = min(similarity for (first, _), similarity in pairs if first in group)
        cosine = opened.similarity == "cosine"
        limit = f"cosine {lowest:.4f} or higher" if cosine else f"distance {-lowest:.4f} or less"
        lines += [f"{len(group)} images, {limit}", *(f"  {relative_path(path)}" for path in paths)]
    members = f"{format_int(sum(map(len, groups)))} of {format_int(len(opened))} images"
    lines.append(f"{pluralize(len(groups), 'group')}, {members}")
    if to_remove is not None:
        paths = result.to_remove()
        if broken := [path for path in paths if "\n" in path]:
            raise UsageError(f"line break in the path {format_value(broken[0])}. Rename the file.")
        atomic_write(to_remove, b"".join(os.fsencode(f"{path}\n") for path in paths))
        lines.append(f"{pluralize(len(paths), 'file')} to remove: {to_remove}")
    if sheet is not None:
        from proximetry.search.image_sheets import group_sheet

        sheet_size = group_sheet(sheet, groups, "Duplicates")
        part = "" if sheet_size == len(groups) else f" of the first {format_int(sheet_size)} groups"
        lines.append(f"contact sheet{part}: {sheet}")
    print_result(as_json, document, "\n".join(lines))
