"""`proximetry explain`: which regions make two images similar."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry.cli.inputs import load_embedder
from proximetry.cli.options import AsJson, Device, EmbedderFolder
from proximetry.cli.output import check_out, print_result

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}


def explain(
    a: Path,
    b: Path,
    /,
    *,
    model: EmbedderFolder,
    out: Path | None = None,
    matches: Annotated[int, Parameter(validator=Number(gte=0, lte=8))] = 3,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Show which regions make two images similar: contributions that add up to their cosine.

    Args:
        a: an image file.
        b: the image file to compare it with.
        out: also draw both images with their contributions: a .png, .jpg or .webp image.
        matches: number of matching regions to list and draw.
    """
    from proximetry._util.files import atomic_path
    from proximetry.data.folders import split_shard_path
    from proximetry.data.image_files import check_exists

    check_out(out, list(_FORMATS), (a, b))
    for image in (a, b):  # before torch is imported
        check_exists(Path(split_shard_path(str(image))[0]))
    explanation = load_embedder(model, device).explain(a, b)
    document = {
        "images": [str(a), str(b)],
        "similarity": round(explanation.similarity, 6),
        "contributions": [values.round(6).tolist() for values in explanation.contributions],
        "matches": [
            {
                "boxes": [[round(value, 1) for value in box] for box in (match.a, match.b)],
                "contribution": round(match.contribution, 6),
            }
            for match in explanation.matches(matches)
        ],
    }
    lines = [f"cosine {explanation.similarity:.4f}"]
    for number, match in enumerate(explanation.matches(matches), 1):
        places = [
            f"{explanation.place(index, box)} of {image.name} ({_corners(box)})"
            for index, (image, box) in enumerate(((a, match.a), (b, match.b)))
        ]
        lines.append(f"  {number}. {match.contribution:.4f}  {' and '.join(places)}")
    if out is not None:
        with atomic_path(out) as part:
            explanation.image(matches).save(part, _FORMATS[out.suffix.lower()], quality=90)
        lines.append(f"image: {out}")
    print_result(as_json, document, "\n".join(lines))


def _corners(box: tuple[float, ...]) -> str:
    left, top, right, bottom = (round(value) for value in box)
    return f"x {left}–{right}, y {top}–{bottom}"
