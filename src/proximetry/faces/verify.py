"""Verification of faces: LFW, YTF, or pairs of one's own."""

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch.distributed as dist

from proximetry._util.errors import Progress
from proximetry.faces.embedder import FaceEmbedder
from proximetry.faces.options import BadImages
from proximetry.faces.pairs import PairProtocol
from proximetry.faces.vectors import FaceVectors
from proximetry.metrics import Verification, pair_similarities, verify


@dataclass(frozen=True)
class PairVerification:
    """The result of `verify_pairs`: the figures, the pairs behind them, and how they were made."""

    result: Verification
    protocol: PairProtocol
    embedder: FaceEmbedder
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return everything as plain values."""
        r, protocol = self.result, self.protocol
        folds = zip(protocol.fold_names, r.fold_accuracies, r.thresholds, strict=True)
        return {
            "protocol": protocol.format,
            "embedder": self.embedder.source,
            "views": self.embedder.views,
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
                # JSON knows no infinity; such a threshold accepts all pairs or none.
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
        }

    def __str__(self) -> str:
        r, protocol = self.result, self.protocol
        rates = [f"{far:g}: {100 * tar:.2f} %" for far, tar in r.tar_at_far.items()]
        rates += [f"{far:g}: too few different pairs" for far in r.unmeasurable_far]
        folds = zip(protocol.fold_names, r.fold_accuracies, strict=True)
        lines = [
            f"{protocol.format}: {len(protocol.pairs)} pairs in {len(r.fold_accuracies)} folds; "
            f"cosine of {self.embedder.views}",
            f"accuracy {100 * r.accuracy:.2f} ± {100 * r.standard_error:.2f} % "
            "(mean and standard error over the folds)",
            f"AUC {r.auc:.5f}, EER {100 * r.eer:.2f} %",
            f"TAR at FAR {', '.join(rates)}",
            "by fold: " + ", ".join(f"{name} {100 * value:.2f}" for name, value in folds),
        ]
        if protocol.skipped:
            lines.append(f"{len(protocol.skipped)} pairs skipped:")
            lines += [f"  {reason}" for reason in protocol.skipped]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def verify_pairs(
    embedder: FaceEmbedder,
    protocol: PairProtocol,
    *,
    batch_size: int = 64,
    bad_images: BadImages = "error",
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> PairVerification:
    """Compare the pairs of a protocol, each image by its vector and that of its mirror image.

    A video is the mean of the unit vectors of its frames. Similarities are cosines, and
    `metrics.verify` chooses each fold's threshold on the other folds. TAR is told at every power of
    ten that the number of different pairs allows. With a ``group`` every process embeds its share
    of the images and returns the same result.
    """
    vectors = FaceVectors(embedder, batch_size, bad_images=bad_images, group=group)
    templates = protocol.templates
    files = [file for of in templates.values() for file in of]
    owners = [owner for owner, of in enumerate(templates.values()) for _ in of]
    notes = embedder.note_on_size(files[0])
    pooled = vectors.pooled(files, owners, progress)
    left = protocol.without(vectors.unreadable)
    row = {name: place for place, name in enumerate(templates)}
    fold = {name: place for place, name in enumerate(left.fold_names)}
    index = [[row[pair.first], row[pair.second]] for pair in left.pairs]
    different = int((~left.same).sum())
    result = verify(
        pair_similarities(pooled, index),
        left.same,
        folds=[fold[name] for name in left.folds],
        far=[10.0**-k for k in range(1, max(2, len(str(different))))],
    )
    return PairVerification(result, left, embedder, (*notes, *left.notes))
