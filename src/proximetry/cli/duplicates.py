"""`proximetry duplicates`: find near-duplicate images in a gallery."""

from pathlib import Path
from typing import Any

from proximetry._util.formatting import format_int, pluralize
from proximetry.cli.inputs import open_gallery
from proximetry.cli.options import AsJson, GalleryAddress
from proximetry.cli.output import check_out, print_result, progress_bar, relative_path
from proximetry.search.manifest import GALLERY


def duplicates(
    gallery: GalleryAddress = GALLERY,
    *,
    threshold: float | None = None,
    sheet: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find near-duplicate images in a gallery.

    Args:
        threshold: minimum cosine, or maximum Euclidean distance, of a pair; default: estimated
            from altered copies of a sample of the images.
        sheet: also write the groups as a self-contained .html page.
    """
    check_out(sheet, [".html"], option="--sheet")
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
    if sheet is not None:
        from proximetry.search.image_sheets import group_sheet

        sheet_size = group_sheet(sheet, groups)
        part = "" if sheet_size == len(groups) else f" of the first {format_int(sheet_size)} groups"
        lines.append(f"contact sheet{part}: {sheet}")
    print_result(as_json, document, "\n".join(lines))
