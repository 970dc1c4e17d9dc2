"""Face verification: LFW, YTF, or custom pairs."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, isnan
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from proximetry._util.charts import line_chart, step_points
from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write
from proximetry._util.types import FloatArray, Progress
from proximetry.faces import BadImages, Flip
from proximetry.faces.face_embedder import FaceEmbedder
from proximetry.faces.file_embedder import FileEmbedder, describe_rates, with_notes
from proximetry.faces.pair_protocol import PairProtocol
from proximetry.metrics import (
    ErrorVersusReject,
    Verification,
    VerificationRates,
    error_versus_reject,
    pair_similarities,
    verify,
)

LOWEST_FAR = 1e-3  # of the curve of errors
MAX_POINTS = 4096  # of a ROC curve as drawn


@dataclass(frozen=True)
class PairVerification:
    """Result of `verify_pairs`."""

    result: Verification
    protocol: PairProtocol
    embedder: FaceEmbedder
    views: str
    notes: tuple[str, ...]
    reject: ErrorVersusReject | None = None

    def document(self) -> dict[str, Any]:
        """Return the result as JSON-compatible values."""
        r, protocol = self.result, self.protocol
        folds = zip(protocol.fold_names, r.fold_accuracies, r.thresholds, strict=True)
        return {
            "protocol": protocol.format,
            "embedder": self.embedder.source,
            "views": self.views,
            "similarity": "cosine",
            "pairs": len(protocol.pairs),
            "same_pairs": r.same_pairs,
            "different_pairs": r.different_pairs,
            "images": len({file for files in protocol.templates.values() for file in files}),
            "accuracy": r.accuracy,
            "standard_error": r.standard_error,
            "auc": r.auc,
            "eer": r.eer,
            "tar_at_far": {f"{far:g}": tar for far, tar in r.tar_at_far.items()},
            "unmeasurable_far": list(r.unmeasurable_far),
            "folds": [
                # JSON has no infinity, the threshold that accepts all pairs or none.
                {
                    "fold": name,
                    "pairs": protocol.folds.count(name),
                    "accuracy": float(accuracy),
                    "threshold": float(threshold) if isfinite(threshold) else None,
                }
                for name, accuracy, threshold in folds
            ],
            "skipped": list(protocol.skipped),
            "notes": list(self.notes),
            **({} if self.reject is None else {"error_versus_reject": _reject_rows(self.reject)}),
        }

    def __str__(self) -> str:
        r, protocol = self.result, self.protocol
        folds = zip(protocol.fold_names, r.fold_accuracies, strict=True)
        lines = [
            f"{protocol.title}: {len(protocol.pairs)} pairs in {len(r.fold_accuracies)} folds; "
            f"cosine of {self.views}",
            f"accuracy {100 * r.accuracy:.2f} ± {100 * r.standard_error:.2f} % "
            "(mean and standard error over the folds)",
            f"AUC {r.auc:.5f}, EER {100 * r.eer:.2f} %",
            f"TAR at FAR {describe_rates(r, 'too few different pairs')}",
            "by fold: " + ", ".join(f"{name} {100 * value:.2f}" for name, value in folds),
        ]
        if self.reject is not None:
            lines += [
                f"error versus reject, pairs of the shortest embeddings first, at the threshold of "
                f"FAR {self.reject.far:g}:",
                "  pairs rejected  FNMR (1 − TAR)      FMR (FAR)",
                *(
                    f"  {100 * row['rejected']:12.1f} %"
                    + "".join(
                        f"{'–':>16}" if row[rate] is None else f"{100 * row[rate]:14.2f} %"
                        for rate in ("fnmr", "fmr")
                    )
                    for row in _reject_rows(self.reject)
                ),
            ]
        return with_notes(lines, protocol.skipped, "pairs", self.notes)


def _reject_rows(curve: ErrorVersusReject) -> list[dict[str, Any]]:
    """Return the points of the curve, without NaN."""
    columns = zip(curve.rejected.tolist(), curve.fnmr.tolist(), curve.fmr.tolist(), strict=True)
    return [
        {
            "rejected": rejected,
            "fnmr": None if isnan(fnmr) else fnmr,
            "fmr": None if isnan(fmr) else fmr,
        }
        for rejected, fnmr, fmr in columns
    ]


def verify_pairs(
    embedder: FaceEmbedder,
    protocol: PairProtocol,
    *,
    flip: Flip | None = None,
    quality: bool = False,
    batch_size: int = 64,
    bad_images: BadImages = "error",
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> PairVerification:
    """Verify the pairs of a protocol by the cosine of their vectors.

    A video is the mean of the unit vectors of its frames.
    `metrics.verify` chooses each fold's threshold on the other folds. TAR is reported at every
    power of ten that the number of different pairs allows.

    Args:
        embedder: maps pixels to vectors.
        protocol: the pairs.
        flip: concatenate or sum the vectors of image and mirror image, or use the image only;
            default: "concat", unless the embedder has flip TTA.
        quality: also compute the error when the pairs of lowest quality are rejected. The quality
            of an image is the length of its vector before L2 normalization (MagFace, AdaFace).
        batch_size: images per forward pass.
        bad_images: "error" raises for unreadable images, "skip" skips their pairs.
        progress: called with (images done, images in total).
        group: processes that share the images and return the same result.

    Examples:
        >>> from PIL import Image
        >>> from proximetry import Embedder
        >>> from proximetry.faces import open_embedder, read_protocol, verify_pairs
        >>> for name, color in (("a1", "red"), ("a2", "red"), ("b1", "blue"), ("b2", "blue")):
        ...     Image.new("RGB", (32, 32), color).save(f"{name}.png")
        >>> pairs = Path("pairs.csv")
        >>> size = pairs.write_text("a1,a2,1\\nb1,b2,1\\na1,b1,0\\na2,b2,0\\n")
        >>> embedder = Embedder.create("small_convnet", 8, weights="none", image_size=32)
        >>> folder = embedder.save("embedder")
        >>> result = verify_pairs(open_embedder(folder), read_protocol(pairs, "."))
        >>> result.result.accuracy
        1.0
    """
    flip = embedder.resolve_flip(flip)
    lengths: dict[str, float] | None = {} if quality else None
    faces = FileEmbedder(embedder, flip, batch_size, bad_images, group, lengths=lengths)
    templates = protocol.templates
    files = [file for images in templates.values() for file in images]
    owners = [owner for owner, images in enumerate(templates.values()) for _ in images]
    sums = faces.sum_by_owner(files, owners, progress)
    readable = protocol.without(faces.unreadable)
    row = {name: index for index, name in enumerate(templates)}
    fold = {name: index for index, name in enumerate(readable.fold_names)}
    same = np.array([pair.same for pair in readable.pairs])
    different = int((~same).sum())
    similarities = pair_similarities(
        sums, [[row[pair.first], row[pair.second]] for pair in readable.pairs]
    )
    result = verify(
        similarities,
        same,
        folds=[fold[name] for name in readable.folds],
        far=[10.0**-k for k in range(1, max(2, len(str(different))))],
    )
    notes = (*readable.notes, *embedder.size_notes(files[0]))
    curve = None
    if lengths is not None:
        measurable = [far for far in result.tar_at_far if far >= LOWEST_FAR]
        if not measurable:
            raise UsageError("--quality needs at least ten different pairs. Omit it.")
        scores = _pair_quality(readable, lengths, embedder.source)
        curve = error_versus_reject(similarities, same, scores, far=min(measurable))
    return PairVerification(result, readable, embedder, faces.views, notes, curve)


def _pair_quality(protocol: PairProtocol, lengths: Mapping[str, float], source: str) -> FloatArray:
    """Return the qualities of both sides of each pair: mean lengths of the vectors."""
    values = np.array(list(lengths.values()))
    if np.ptp(values) <= 1e-3 * values.max():
        raise UsageError(
            f"--quality: the vectors of {source} all have length {values.max():.3g}. Use a model "
            "that does not normalize them."
        )
    quality = {
        name: float(np.mean([lengths[file] for file in files]))
        for name, files in protocol.templates.items()
    }
    return np.array([(quality[pair.first], quality[pair.second]) for pair in protocol.pairs])


def draw_roc(result: VerificationRates, label: str, out: Path) -> None:
    """Draw TAR against FAR, from 1 / number of different pairs, as SVG."""
    lowest = 1 / result.different_pairs
    # FAR 0 has no position on a logarithmic axis.
    far, first = np.maximum(result.roc.far, lowest), int(np.sum(result.roc.far <= lowest)) - 1
    far, tar = far[first:], result.roc.tar[first:]
    if len(far) > MAX_POINTS:
        rows = np.unique(np.searchsorted(far, np.geomspace(lowest, 1, MAX_POINTS), "right") - 1)
        far, tar = far[rows], tar[rows]
    points = step_points([*far.tolist(), 1.0], tar.tolist())
    title, x_label = "true accept rate (%)", "false accept rate"
    chart = line_chart(title, {label: points}, x_label=x_label, log=True, file=True)
    atomic_write(out, chart.encode())
