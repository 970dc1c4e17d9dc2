"""IJB-B and IJB-C: verification of templates, sets of images and video frames of one person.

The files are those of InsightFace's evaluation, here for IJB-C:

* ``meta/ijbc_face_tid_mid.txt``: image, template, media (a photo or a video),
* ``meta/ijbc_name_5pts_score.txt``: image, x and y of five points, score of the face detector,
* ``meta/ijbc_template_pair_label.txt``: template, template, whether they are the same person,
* ``loose_crop/``: the images.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, join_first
from proximetry._util.types import FloatArray, IntArray, Progress
from proximetry.data.images import MAX_PIXELS, ImageError, open_image
from proximetry.faces import BadImages, Flip, Size
from proximetry.faces.face_embedder import FaceEmbedder
from proximetry.faces.file_embedder import FileEmbedder, describe_rates, with_notes
from proximetry.faces.geometry import height_and_width, similarity, template, warp
from proximetry.metrics import VerificationRates, pair_similarities, verification_rates
from proximetry.metrics._search.similarities import normalize
from proximetry.models import Preprocessing
from proximetry.models.preprocessing import ImageSource

_FAR = tuple(10.0**-k for k in range(1, 7))
_TITLES = {"ijbb": "IJB-B", "ijbc": "IJB-C"}


@dataclass(frozen=True)
class TemplateProtocol:
    """Templates, sets of images of one person, and pairs of them.

    Attributes:
        source: the folder.
        title: "IJB-B" or "IJB-C".
        files: the images.
        points: x and y of five points in each image, [images, 5, 2].
        scores: the score of the face detector for each image.
        templates: the template of each image, an index of ``template_ids``.
        media: the photo or video of each image, by number.
        template_ids: the templates.
        pairs: indices of ``template_ids``, [pairs, 2].
        same: whether each pair shows the same person.
    """

    source: str
    title: str
    files: tuple[str, ...]
    points: FloatArray
    scores: FloatArray
    templates: IntArray
    media: IntArray
    template_ids: IntArray
    pairs: IntArray
    same: npt.NDArray[np.bool_]


def read_ijb(folder: str | os.PathLike[str], bad_images: BadImages = "error") -> TemplateProtocol:
    """Read the lists of IJB-B or IJB-C in a folder with ``meta/`` and ``loose_crop/``.

    With ``bad_images="error"``, missing images raise a ValueError.
    """
    home = Path(folder)
    lists = sorted((home / "meta").glob("*_face_tid_mid.txt"))
    if len(lists) != 1:
        raise UsageError(
            f"{home} has {len(lists)} lists meta/*_face_tid_mid.txt, expected the one of IJB-B or "
            "IJB-C. Pass a list of pairs for other images."
        )
    prefix = lists[0].name.removesuffix("_face_tid_mid.txt")
    landmarks, pair_list = (
        home / "meta" / f"{prefix}_{rest}.txt"
        for rest in ("name_5pts_score", "template_pair_label")
    )
    names, columns = _read_rows(lists[0], 2)
    other_names, values = _read_rows(landmarks, 11)
    if names != other_names:
        raise ValueError(f"{lists[0]} and {landmarks} list different images")
    images = home / "loose_crop"
    if not images.is_dir():
        raise UsageError(f"no such folder: {images}. It holds the images of {prefix}.")
    missing = set(names) - set(os.listdir(images))
    if missing and bad_images == "error":
        raise ValueError(
            f"{len(missing)} of {len(names)} images do not exist in {images}: "
            f"{join_first(sorted(missing))}. Skip them with --bad-images skip."
        )
    template_ids, templates = np.unique(columns[:, 0].astype(np.int64), return_inverse=True)
    pairs, same = _read_pairs(pair_list, template_ids)
    return TemplateProtocol(
        str(home),
        _TITLES.get(prefix, prefix),
        tuple(str(images / name) for name in names),
        values[:, :10].reshape(-1, 5, 2),
        values[:, 10],
        templates,
        columns[:, 1].astype(np.int64),
        template_ids,
        pairs,
        same,
    )


def _read_rows(file: Path, count: int) -> tuple[list[str], FloatArray]:
    """Return the names and the numbers of a list with lines of a name and ``count`` numbers."""

    def rows(names: list[str]) -> Iterator[list[float]]:
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            for number, line in enumerate(lines, 1):
                fields = line.split()
                if not fields:
                    continue
                try:
                    values = [float(value) for value in fields[1:]]
                except ValueError as error:
                    raise ValueError(f"{file}: line {number}: {error}") from None
                if len(values) != count or not np.isfinite(values).all():
                    raise ValueError(
                        f"{file}: line {number}: expected an image and {count} numbers"
                    )
                names.append(fields[0])
                yield values

    if not file.is_file():
        raise UsageError(f"no such file: {file}. It is part of IJB-B and IJB-C.")
    names: list[str] = []
    numbers = np.array([*rows(names)])
    if not names:
        raise ValueError(f"{file} is empty")
    return names, numbers


def _read_pairs(file: Path, template_ids: IntArray) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    if not file.is_file():
        raise UsageError(f"no such file: {file}. It is part of IJB-B and IJB-C.")
    try:
        table = np.loadtxt(file, np.int64, comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    if table.shape[1] != 3 or not len(table):
        raise ValueError(f"{file}: expected lines of two templates and a label")
    pairs, same = table[:, :2], table[:, 2]
    rows = np.searchsorted(template_ids, pairs).clip(max=len(template_ids) - 1)
    unknown = pairs[template_ids[rows] != pairs]
    if len(unknown):
        raise ValueError(f"{file}: templates without images: {join_first(map(str, unknown))}")
    if not np.isin(same, (0, 1)).all():
        raise ValueError(f"{file}: labels must be 0 or 1")
    return rows, same.astype(np.bool_)


@dataclass(frozen=True)
class TemplateVerification:
    """Result of `verify_templates`."""

    result: VerificationRates
    protocol: TemplateProtocol
    embedder: FaceEmbedder
    views: str
    skipped: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """Return the result as JSON-compatible values."""
        r = self.result
        return {
            "protocol": self.protocol.title,
            "embedder": self.embedder.source,
            "views": self.views,
            "similarity": "cosine",
            "images": len(self.protocol.files),
            "templates": len(self.protocol.template_ids),
            "pairs": r.same_pairs + r.different_pairs,
            "same_pairs": r.same_pairs,
            "different_pairs": r.different_pairs,
            "auc": r.auc,
            "eer": r.eer,
            "tar_at_far": {f"{far:g}": tar for far, tar in r.tar_at_far.items()},
            "unmeasurable_far": list(r.unmeasurable_far),
            "skipped": list(self.skipped),
        }

    def __str__(self) -> str:
        r, protocol = self.result, self.protocol
        lines = [
            f"{protocol.title}: {format_int(r.same_pairs + r.different_pairs)} pairs of "
            f"{format_int(len(protocol.template_ids))} templates with "
            f"{format_int(len(protocol.files))} images; cosine of {self.views}",
            f"AUC {r.auc:.5f}, EER {100 * r.eer:.2f} %",
            f"TAR at FAR {describe_rates(r, 'too few different pairs')}",
        ]
        return with_notes(lines, self.skipped, "images or templates", ())


def verify_templates(
    embedder: FaceEmbedder,
    protocol: TemplateProtocol,
    *,
    flip: Flip | None = None,
    batch_size: int = 64,
    bad_images: BadImages = "error",
    progress: Progress | None = None,
    group: dist.ProcessGroup | None = None,
) -> TemplateVerification:
    """Verify pairs of templates by the cosine of their vectors; options as in `verify_pairs`.

    As in InsightFace's evaluation, images are aligned by their five points, and their vectors, by
    default the sum for image and mirror image before L2 normalization, are multiplied by the score
    of the detector. A template is the sum over its photos and videos of the mean over their images.
    """
    aligned = replace(embedder, preprocessing=_Aligned.by_points(embedder, protocol))
    flip = embedder.resolve_flip(flip, default="sum")
    faces = FileEmbedder(aligned, flip, batch_size, bad_images, group, unnormalized=True)
    count = len(protocol.template_ids)
    media, inverse, sizes = np.unique(
        np.stack([protocol.templates, protocol.media], 1),
        axis=0,
        return_inverse=True,
        return_counts=True,
    )
    # A single image is added to its template. Several have a row of their own for their mean.
    several = sizes > 1
    rows = np.where(several, count + np.cumsum(several) - 1, media[:, 0])
    owners = rows[inverse.ravel()]
    sums = faces.sum_by_owner(protocol.files, owners.tolist(), progress, protocol.scores)
    readable = np.array([file not in faces.unreadable for file in protocol.files])
    images = np.bincount(owners[readable], minlength=len(sums))[count:].clip(min=1)
    means = sums[count:] / torch.from_numpy(images)[:, None]
    vectors = sums[:count].index_add(0, torch.from_numpy(media[several, 0]), means)
    empty = np.bincount(protocol.templates[readable], minlength=count) == 0
    compared = ~empty[protocol.pairs].any(1)
    result = verification_rates(
        _cosines(vectors.to(embedder.device), protocol.pairs[compared]),
        protocol.same[compared],
        _FAR,
    )
    skipped = [f"{file}: {reason}" for file, reason in sorted(faces.unreadable.items())]
    skipped += [f"template {i}: no readable image" for i in protocol.template_ids[empty].tolist()]
    return TemplateVerification(result, protocol, embedder, faces.views, tuple(skipped))


def _cosines(vectors: Tensor, pairs: IntArray) -> Tensor:
    return pair_similarities(normalize(vectors), pairs, similarity="dot")


@dataclass(frozen=True)
class _Aligned(Preprocessing):
    """Preprocessing that first aligns faces by their points."""

    points: Mapping[str, FloatArray] = field(default_factory=dict, compare=False)

    @classmethod
    def by_points(cls, embedder: FaceEmbedder, protocol: TemplateProtocol) -> "_Aligned":
        points = dict(zip(protocol.files, protocol.points, strict=True))
        return cls(**vars(embedder.preprocessing), points=points)

    def pixels(self, source: ImageSource, *, max_pixels: int = MAX_PIXELS) -> Tensor:
        size: Size = "112x96" if self.crop == (112, 96) else "112x112"
        file = str(source)
        matrix = similarity(self.points[file], template(size))
        if matrix is None:
            raise ImageError(file, "its five points coincide")
        image = np.asarray(open_image(file, max_pixels=max_pixels))
        return super().pixels(warp(image, matrix, *height_and_width(size)))
