"""Align five points of a face with a template by a similarity: rotation, scale, translation."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from proximetry.faces import Size

Pixels: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]

# Left eye, right eye (as seen in the image), nose, left and right corner of the mouth: x and y in
# an image 96 wide and 112 high, from SphereFace's code. ArcFace's image has eight more columns on
# either side.
_POINTS = (
    (30.2946, 51.6963),
    (65.5318, 51.5014),
    (48.0252, 71.7366),
    (33.5493, 92.3655),
    (62.7299, 92.2041),
)
_LEFT: dict[Size, float] = {"112x112": 8.0, "112x96": 0.0}


def height_and_width(size: Size) -> tuple[int, int]:
    """Return the height and width of a size."""
    height, width = map(int, size.split("x"))
    return height, width


def template(size: Size) -> npt.NDArray[np.float64]:
    """Return the five points of an aligned face, [5, 2], x before y."""
    return np.array([(x + _LEFT[size], y) for x, y in _POINTS])


def similarity(points: Floats, targets: Floats) -> npt.NDArray[np.float64] | None:
    """Return the 2 × 3 matrix of the least-squares similarity (Umeyama 1991) of points to targets.

    In the plane, a similarity is a linear map of complex numbers, z → az + b, so this is linear
    regression. None if the points coincide or would shrink to one point.

    Examples:
        >>> targets = template("112x112")
        >>> similarity(targets / 2 - 5, targets).round(3)
        array([[ 2., -0., 10.],
               [ 0.,  2., 10.]])
    """
    z, w = (np.asarray(p, np.float64) @ (1, 1j) for p in (points, targets))
    centered = z - z.mean()
    spread = np.vdot(centered, centered).real
    with np.errstate(all="ignore"):
        a = np.vdot(centered, w - w.mean()) / spread
        b = w.mean() - a * z.mean()
    matrix = np.array([[a.real, -a.imag, b.real], [a.imag, a.real, b.imag]])
    return matrix if np.isfinite(matrix).all() and abs(a) > 1e-9 else None


def warp(image: Pixels, matrix: Floats, height: int, width: int) -> Pixels:
    """Warp an image [H, W, 3] by a similarity to [height, width, 3].

    Bilinear, black outside the image, as OpenCV's warpAffine and scikit-image's warp. The center of
    the first pixel is (0, 0).
    """
    inverse = 1 / complex(matrix[0, 0], matrix[1, 0])
    start = -inverse * complex(matrix[0, 2], matrix[1, 2])
    corners = start + inverse * np.array([0, width, 1j * height, width + 1j * height])
    left, top = (max(int(sides.min()) - 1, 0) for sides in (corners.real, corners.imag))
    right, bottom = (max(int(sides.max()) + 2, 0) for sides in (corners.real, corners.imag))
    # One pixel of black around the image is enough.
    part = np.pad(image[top:bottom, left:right], ((1, 1), (1, 1), (0, 0))).astype(np.float32)
    # The center of Pillow's first pixel is (0.5, 0.5).
    origin = start - complex(left - 1, top - 1) + (0.5 + 0.5j) * (1 - inverse)
    affine = (inverse.real, -inverse.imag, origin.real, inverse.imag, inverse.real, origin.imag)
    planes = [  # floats, since Pillow truncates bytes instead of rounding
        np.asarray(
            Image.fromarray(plane).transform(
                (width, height), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR
            )
        )
        for plane in np.moveaxis(part, 2, 0)
    ]
    return (np.stack(planes, 2) + 0.5).astype(np.uint8)
