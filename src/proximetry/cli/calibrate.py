"""`proximetry calibrate`: thresholds and probabilities of an embedder's similarities."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int
from proximetry.cli.inputs import load_embedder, open_images
from proximetry.cli.options import (
    AsJson,
    BatchSize,
    Device,
    EmbedderFolder,
    LabelsFromName,
    TableColumns,
)
from proximetry.cli.output import print_result, progress_bar

if TYPE_CHECKING:
    from proximetry.data import Catalog
    from proximetry.metrics import Calibration, OperatingPoint


def calibrate(
    embedder: EmbedderFolder,
    images: str | None = None,
    *,
    root: Path | None = None,
    gallery_images: Annotated[int, Parameter(validator=Number(gte=1))] = 5,
    batch_size: BatchSize = 64,
    columns: TableColumns = None,
    labels_from_name: LabelsFromName = None,
    device: Device = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Measure which similarity means "the same class", on classes not trained on.

    Training calibrates at its end if it has held-out classes or a test set of other classes.
    Search, the search page and `same` then answer with probabilities and "no match".

    Args:
        images: a folder of class folders, a CSV or Parquet table, a tar file or a dataset, of at
            least ten classes that were not trained on; default: the held-out classes of the run,
            else its test set.
        root: path of the images of such a dataset.
        gallery_images: images per class of the galleries whose threshold is measured.
        out: folder to save the calibrated embedder to; default: where it is.
    """
    from proximetry.data import resolve_source
    from proximetry.models.storage import find_embedder

    if out is None and not embedder.is_dir():
        raise UsageError(f"{embedder} is not a folder. Pass --out to save the calibrated embedder.")
    if images is None:
        catalog = _unseen_images(embedder, root)
    else:
        name, path = resolve_source(images, root)
        catalog = open_images(name, path, columns, False, labels_from_name)
    model = load_embedder(embedder, device)
    with progress_bar("embedding") as progress:
        calibration = model.calibrate(
            catalog, gallery_images=gallery_images, batch_size=batch_size, progress=progress
        )
    folder = model.save(find_embedder(embedder) if out is None else out)
    document = {"embedder": str(embedder), "saved": str(folder), **calibration.to_json()}
    print_result(as_json, document, f"{as_text(calibration)}\n\nsaved in {folder}")


def _unseen_images(run: Path, root: Path | None) -> "Catalog":
    """Return the images of classes that a run held out of training, else its test set."""
    from proximetry.reports import RunRecord
    from proximetry.training.sources.training_data import open_catalog, split_rows

    recipe = RunRecord.read(run).recipe
    catalog = open_catalog(recipe if root is None else recipe.override({"data.root": str(root)}))
    rows = split_rows(catalog, recipe).rows
    split = next((name for name in ("held_out", "test") if len(rows[name])), None)
    if split is None:
        raise UsageError(
            f"the run in {run} has no held-out classes and no test set. Pass images of other "
            "classes."
        )
    return catalog.subset(rows[split])


def as_text(calibration: "Calibration") -> str:
    """Return the tables of a calibration."""
    parts = [
        f"{format_int(calibration.images)} images of {calibration.classes} classes",
        _table("Two images: false accepts", "same accepted", calibration.pairs),
        _table(
            f"Nearest image in a gallery ({calibration.gallery_classes} classes of "
            f"{calibration.gallery_images}): unknown accepted",
            "known found",
            calibration.gallery,
        ),
        f"Probability of the same class: {calibration.curve} curve, calibration error "
        f"{calibration.calibration_error:.3f} on other classes.",
    ]
    if calibration.unmeasurable:
        rates = ", ".join(f"{rate:g}" for rate in calibration.unmeasurable)
        parts.append(f"Not measurable with so few images: {rates}.")
    return "\n\n".join(part for part in parts if part)


def _table(title: str, accepted: str, points: "tuple[OperatingPoint, ...]") -> str:
    if not points:
        return ""
    header = (
        f"  {'target':>8}  {'threshold':>9}  {'95 % interval':>17}  {accepted:>13}  other classes"
    )
    lines = [title, header]
    for point in points:
        interval = f"{point.low:.4f} to {point.high:.4f}"
        lines.append(
            f"  {100 * point.target:>6g} %  {point.threshold:9.4f}  {interval:>17}  "
            f"{100 * point.true_accepts:>11.1f} %  {100 * point.achieved:.3g} %"
        )
    return "\n".join(lines)
