"""Similarity and warp against independent computations and other libraries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from proximetry.faces import similarity, template, warp
from proximetry.faces.geometry import height_and_width

SIZES = ("112x112", "112x96")
image_points = hnp.arrays(np.float64, (5, 2), elements=st.floats(0, 400))


def umeyama(points, targets):
    """Eq. 40 to 42 of Umeyama 1991: rotation from a singular value decomposition, then scale."""
    x, y = points.mean(0), targets.mean(0)
    covariance = (targets - y).T @ (points - x) / len(points)
    u, d, vt = np.linalg.svd(covariance)
    sign = np.array([1.0, np.sign(np.linalg.det(u) * np.linalg.det(vt))])
    rotation = u @ np.diag(sign) @ vt
    scale = (d * sign).sum() / ((points - x) ** 2).sum(1).mean()
    return np.column_stack([scale * rotation, y - scale * rotation @ x])


def slow_warp(image, matrix, height, width):
    """Bilinear, pixel by pixel, with black beyond the edge."""
    inverse = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    result = np.zeros((height, width, 3))
    for row in range(height):
        for column in range(width):
            x, y, _ = inverse @ (column, row, 1)
            left, top = int(np.floor(x)), int(np.floor(y))
            for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
                if 0 <= top + i < image.shape[0] and 0 <= left + j < image.shape[1]:
                    share = abs(1 - i - (y - top)) * abs(1 - j - (x - left))
                    result[row, column] += share * image[top + i, left + j]
    return result


def photograph(seed=0, height=180, width=150):
    """Return an image as smooth as a photograph, with some noise."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (14, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float64)
    return np.clip(smooth + random.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


def some_points(seed, shift=0.0):
    random = np.random.default_rng(seed)
    face = template("112x112") * random.uniform(0.7, 1.4) + random.uniform(-10, 30, 2) + shift
    angle = random.uniform(-0.6, 0.6)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return (face - face.mean(0)) @ turn.T + face.mean(0) + random.normal(0, 2, (5, 2))


@given(image_points, st.sampled_from(SIZES))
def test_similarity_equals_umeyama(points, size):
    spread = np.linalg.norm(points - points.mean(0))
    expected = umeyama(points, template(size)) if spread > 1 else None
    if expected is None or np.hypot(*expected[:, 0]) < 1e-3:
        return  # see test_degenerate_points
    result = similarity(points, template(size))
    np.testing.assert_allclose(result, expected, atol=1e-7, rtol=1e-7)


@given(image_points, st.floats(-3, 3), st.floats(0.1, 10), st.floats(-50, 50))
def test_similarity_is_recovered(points, angle, scale, shift):
    if np.linalg.norm(points - points.mean(0)) < 1:
        return
    turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    result = similarity(points, points @ turn.T + shift)
    np.testing.assert_allclose(result, np.column_stack([turn, [shift, shift]]), atol=1e-6)


@pytest.mark.parametrize("points", [np.full((5, 2), 7.0), np.full((5, 2), np.nan)])
def test_degenerate_points_have_no_similarity(points):
    assert similarity(points, template("112x112")) is None


@pytest.mark.parametrize("shift", [0.0, -25.0, 90.0, 500.0], ids=lambda s: f"shift{s:.0f}")
def test_warp_is_bilinear_and_black_outside(shift):
    image = photograph(1)
    for size in SIZES:
        matrix = similarity(some_points(2, shift), template(size))
        expected = slow_warp(image, matrix, 56, 48)
        result = warp(image, matrix, 56, 48)
        assert result.dtype == np.uint8
        assert np.abs(result - expected).max() <= 0.5 + 1e-3
    assert (result == 0).all() == (shift == 500.0)


@pytest.mark.parametrize("seed", range(4))
def test_112x96_is_the_middle_of_112x112(seed):
    image, points = photograph(seed), some_points(seed)
    large, small = (
        warp(image, similarity(points, template(size)), *height_and_width(size)) for size in SIZES
    )
    assert large.shape == (112, 112, 3)
    np.testing.assert_array_equal(large[:, 8:104], small)


@pytest.mark.parametrize("seed", range(4))
def test_warp_equals_scikit_image(seed):
    transform = pytest.importorskip("skimage.transform", reason="scikit-image is not installed")
    image, points = photograph(seed), some_points(seed)
    theirs = transform.SimilarityTransform.from_estimate(points, template("112x112"))
    matrix = similarity(points, template("112x112"))
    np.testing.assert_allclose(matrix, theirs.params[:2], atol=1e-9)
    expected = transform.warp(
        image, theirs.inverse, output_shape=(112, 112), order=1, preserve_range=True
    )
    difference = np.abs(warp(image, matrix, 112, 112) - expected)
    assert difference.mean() < 0.5  # rounding to whole gray levels accounts for 0.25
    assert difference.max() <= 1.0


@pytest.mark.parametrize("seed", range(4))
def test_warp_equals_opencv(seed):
    """Like cv2.warpAffine: positions in 1/32 pixel, weights in 1/32768."""
    image, matrix = photograph(seed), similarity(some_points(seed), template("112x112"))
    inverse = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))[:2]
    columns, rows = np.meshgrid(np.arange(112), np.arange(112))
    x, y = np.rint(32 * (inverse[:, :2] @ [columns.ravel(), rows.ravel()] + inverse[:, 2:]))
    padded = np.pad(image.astype(np.int64), ((400, 400), (400, 400), (0, 0)))
    total = np.zeros((112 * 112, 3), np.int64)
    for i in (0, 1):
        for j in (0, 1):
            weight = 32 * np.abs((1 - i) * 32 - y % 32) * np.abs((1 - j) * 32 - x % 32)
            place = (y // 32).astype(int) + i + 400, (x // 32).astype(int) + j + 400
            total += weight.astype(np.int64)[:, None] * padded[place]
    expected = ((total + (1 << 14)) >> 15).reshape(112, 112, 3)
    assert np.abs(warp(image, matrix, 112, 112) - expected).mean() < 1
