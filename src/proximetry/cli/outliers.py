"""`proximetry outliers`: find unusual images and probable label errors in a gallery."""

from pathlib import Path
from typing import Any

from proximetry._util.formatting import pluralize
from proximetry.cli.inputs import open_gallery
from proximetry.cli.options import AsJson, GalleryAddress
from proximetry.cli.output import check_out, print_result, progress_bar, relative_path
from proximetry.search.manifest import GALLERY

_SHEET_NEIGHBORS = 6


def outliers(
    gallery: GalleryAddress = GALLERY, *, sheet: Path | None = None, as_json: AsJson = False
) -> None:
    """Find images far from all others, and labels that disagree with those of the neighbors.

    Args:
        sheet: also write these images, each with its nearest neighbors, as a self-contained .html
            page.
    """
    check_out(sheet, [".html"], option="--sheet")
    opened = open_gallery(gallery, None)
    with progress_bar("searching") as progress:
        found = opened.outliers(progress=progress)
        classes = len(opened.count_labels())
        wrong = opened.label_errors(progress=progress) if classes > 1 else []
    document: dict[str, Any] = {
        "gallery": gallery,
        "images": len(opened),
        "outliers": [one._asdict() for one in found],
        "label_errors": [one._asdict() for one in wrong],
    }
    sign = 1 if opened.similarity == "cosine" else -1
    lines = [f"{sign * one.similarity:8.4f}  {relative_path(one.path)}" for one in found]
    measure = "cosine" if sign > 0 else "distance"
    lines.append(f"{pluralize(len(found), 'outlier')} (mean {measure} to the 5 nearest images)")
    if classes > 1:
        lines += [
            f"{100 * one.probability:6.0f} %  {one.label} → {one.suggestion}?  "
            f"{relative_path(one.path)}"
            for one in wrong
        ]
        lines.append(f"{pluralize(len(wrong), 'probable label error')}")
    if sheet is not None:
        from proximetry.search.image_sheets import group_sheet

        ids = [one.id for one in found] + [one.id for one in wrong]
        groups = []
        if ids:
            neighbors = opened.search(ids, _SHEET_NEIGHBORS).paths.tolist()
            paths = opened.rows(ids, ["path"])["path"]
            groups = [[path, *row] for path, row in zip(paths, neighbors, strict=True)]
        group_sheet(sheet, groups, "Outliers and label errors, with their nearest neighbors")
        lines.append(f"contact sheet: {sheet}")
    print_result(as_json, document, "\n".join(lines))
