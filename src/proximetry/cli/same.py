"""`proximetry same`: whether two images show the same class."""

from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError
from proximetry.cli.inputs import load_embedder
from proximetry.cli.options import AsJson, Device
from proximetry.cli.output import format_bound, print_result


def same(
    first: Path,
    second: Path,
    /,
    *,
    model: Path,
    far: float = 1e-3,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Decide whether two images show the same class, with a calibrated embedder.

    Args:
        first: an image file.
        second: another image file.
        model: a run, an embedder or an ONNX file that was calibrated (`proximetry calibrate`).
        far: the false accept rate of the decision, one that was calibrated.
    """
    document = compare_images(load_embedder(model, device), str(model), first, second, far)
    print_result(as_json, document, as_text(document))


def compare_images(
    embedder: Any, name: str, first: Path, second: Path, far: float
) -> dict[str, Any]:
    """Return similarity, probability and decision for two image files."""
    calibration = embedder.calibration
    if calibration is None:
        raise UsageError(f"{name} is not calibrated. Run: proximetry calibrate {name}")
    points = {point.target: point for point in calibration.pairs}
    if far not in points:
        rates = ", ".join(f"{rate:g}" for rate in points)
        raise UsageError(f"{name} is not calibrated for a false accept rate of {far:g}: {rates}.")
    similarity = float(embedder.similarity(first, second))
    return {
        "images": [str(first), str(second)],
        "similarity": similarity,
        "measure": calibration.similarity,
        "probability": float(calibration.probability(similarity)),
        "same": similarity >= points[far].threshold,
        "threshold": points[far].threshold,
        "far": far,
    }


def as_text(document: dict[str, Any]) -> str:
    """Return the decision in words."""
    is_cosine = document["measure"] == "cosine"
    measure, sign = ("cosine", 1) if is_cosine else ("distance", -1)
    return (
        f"{'same' if document['same'] else 'different'} class: {measure} "
        f"{sign * document['similarity']:.4f}; same class if "
        f"{format_bound(document['threshold'], document['measure'])}, at a false accept rate of "
        f"{document['far']:g}\n"
        f"probability {100 * document['probability']:.1f} %, if same and different are equally "
        "likely beforehand"
    )
