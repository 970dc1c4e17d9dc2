"""Five points of a face laid on a template by a similarity: turned, scaled and moved, not bent."""

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from proximetry.faces.options import Size

Pixels: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]

# Left eye, right eye (as seen in the picture), nose, left and right corner of the mouth: x and y
# in a picture 96 wide and 112 high, from SphereFace's code. ArcFace's picture is the same with
# eight columns more on either side.
_POINTS = (
    (30.2946, 51.6963),
    (65.5318, 51.5014),
    (48.0252, 71.7366),
    (33.5493, 92.3655),
    (62.7299, 92.2041),
)
_LEFT: dict[Size, float] = {"112x112": 8.0, "112x96": 0.0}


def height_and_width(size: Size) -> tuple[int, int]:
    """Return the two numbers of a size."""
    height, width = map(int, size.split("x"))
    return height, width


def template(size: Size) -> npt.NDArray[np.float64]:
    """Return where the five points lie in an aligned face, [5, 2], x before y."""
    return np.array([(x + _LEFT[size], y) for x, y in _POINTS])


def similarity(points: Floats, targets: Floats) -> npt.NDArray[np.float64] | None:
    """Return the 2 × 3 matrix of the similarity that brings points nearest to their targets.

    Nearest in the sense of least squares (Umeyama 1991). In the plane a turn and a scale are one
    multiplication of complex numbers, z → az + b, so the solution is that of a regression line.
    None if there is none: the points coincide, or lie such that they would be shrunk to one.
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
    """Return the picture [height, width, 3] that a similarity makes of an image [H, W, 3].

    Bilinear, black outside the image, as OpenCV's warpAffine and scikit-image's warp do it. Points
    are counted from the middle of the first pixel.
    """
    x, y = _sources(matrix, height, width)
    # Beyond one pixel of black around the image there is only more black.
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


def _sources(
    matrix: Floats, height: int, width: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Where in the image the pixels of the result come from, row by row: x and y."""
    inverse = 1 / complex(matrix[0, 0], matrix[1, 0])
    start = -inverse * complex(matrix[0, 2], matrix[1, 2])
    columns, rows = np.arange(width), np.arange(height)[:, None]
    x = (inverse.real * columns + start.real) - inverse.imag * rows
    y = (inverse.imag * columns + start.imag) + inverse.real * rows
    return x.ravel(), y.ravel()
