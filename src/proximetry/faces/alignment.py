"""Align five points of a face with a template by a similarity: rotation, scale, translation."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

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
    """Return height and width of a size."""
    height, width = map(int, size.split("x"))
    return height, width


def template(size: Size) -> npt.NDArray[np.float64]:
    """Return the five points of an aligned face, [5, 2], x before y."""
    return np.array([(x + _LEFT[size], y) for x, y in _POINTS])


def similarity(points: Floats, targets: Floats) -> npt.NDArray[np.float64] | None:
    """Return the 2 × 3 matrix of the least-squares similarity (Umeyama 1991) of points to targets.

    In the plane, rotation and scale are one multiplication of complex numbers, z → az + b, so this
    is linear regression. None if the points coincide or would be shrunk to one.
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
    # Coordinates in the image of each pixel of the result, row by row.
    inverse = 1 / complex(matrix[0, 0], matrix[1, 0])
    start = -inverse * complex(matrix[0, 2], matrix[1, 2])
    columns, rows = np.arange(width), np.arange(height)[:, None]
    x = ((inverse.real * columns + start.real) - inverse.imag * rows).ravel()
    y = ((inverse.imag * columns + start.imag) + inverse.real * rows).ravel()
    # One pixel of black around the image is enough.
    np.clip(x, -1, image.shape[1], out=x)
    np.clip(y, -1, image.shape[0], out=y)
    left, top = np.floor(x), np.floor(y)
    across, down = (x - left).astype(np.float32), (y - top).astype(np.float32)
    first, last = ((int(edge(top)), int(edge(left))) for edge in (np.min, np.max))
    if min(first) < 0 or last[0] + 1 >= image.shape[0] or last[1] + 1 >= image.shape[1]:
        part = image[max(first[0], 0) : last[0] + 2, max(first[1], 0) : last[1] + 2]
        image = np.pad(part, ((1, 2), (1, 2), (0, 0)))
        top -= max(first[0], 0) - 1
        left -= max(first[1], 0) - 1
    places, stride = (top * image.shape[1] + left).astype(np.intp), image.shape[1]
    pixels = image.reshape(-1, 3)

    def between(offset: int) -> npt.NDArray[np.float32]:
        # As planes, [3, places]: NumPy then works along whole rows.
        near: npt.NDArray[np.float32] = pixels.take(places + offset, 0).T.astype(np.float32)
        far = pixels.take(places + offset + 1, 0).T.astype(np.float32)
        far -= near
        far *= across
        near += far
        return near

    upper, lower = between(0), between(stride)
    lower -= upper
    lower *= down
    upper += lower
    upper += 0.5
    return upper.T.astype(np.uint8, order="C").reshape(height, width, 3)
