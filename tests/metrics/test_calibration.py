"""Calibration against brute force, scikit-learn, and other classes of the same kind."""

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from proximetry.metrics import Calibration, calibrate, evaluate_calibration
from proximetry.metrics import calibration_fitting as fitting


def make_images(classes=24, each=8, spread=0.9, seed=0, dim=16):
    """Vectors around random class centers, and their labels."""
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(classes, dim))
    labels = np.repeat(np.arange(classes), each)
    return (centers[labels] + spread * rng.normal(size=(len(labels), dim))), labels


def all_pairs(vectors, labels, similarity="cosine"):
    """Similarity, truth and the two classes of every pair, one at a time."""
    for i, j in combinations(range(len(vectors)), 2):
        a, b = vectors[i], vectors[j]
        value = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        if similarity == "euclidean":
            value = -np.linalg.norm(a - b)
        yield np.float32(value), labels[i] == labels[j], labels[i], labels[j]


@pytest.mark.parametrize("similarity", ["cosine", "euclidean"])
def test_thresholds_of_pairs_equal_brute_force(similarity):
    vectors, labels = make_images()
    calibration = calibrate(vectors, labels, similarity=similarity, far=(0.1, 0.01, 1e-6))
    values, same, _, _ = map(np.array, zip(*all_pairs(vectors, labels, similarity), strict=True))
    impostors = np.sort(values[~same])[::-1]
    for point in calibration.pairs:
        allowed = int(point.target * len(impostors))
        # Accepts as many as allowed, and the next impostor is just below.
        assert impostors[allowed] < point.threshold <= impostors[allowed - 1]
        assert point.true_accepts == pytest.approx(np.mean(values[same] >= point.threshold))
        assert point.low <= point.threshold <= point.high
        assert point.achieved == pytest.approx(point.target, rel=0.5)
    assert calibration.unmeasurable == (1e-6, 0.01) or calibration.unmeasurable == (1e-6,)


def test_resampled_thresholds_equal_brute_force():
    vectors, labels = make_images(classes=12, each=4)
    pairs = fitting._Pairs.measure(vectors, labels, "cosine", np.random.default_rng(0))
    weights = np.random.default_rng(1).integers(0, 4, 12)
    (threshold,) = pairs.trials().resampled_thresholds([0.1], [weights])[0]
    repeated = []
    for value, same, a, b in all_pairs(vectors, labels):
        repeated += [value] * (0 if same else weights[a] * weights[b])
    repeated = np.sort(repeated)[::-1]
    allowed = int(0.1 * len(repeated))
    assert threshold == np.nextafter(repeated[allowed], np.float32(np.inf))


def test_gallery_thresholds_equal_brute_force():
    """Images of a class are equal, so that every choice of a gallery gives the same result."""
    centers, _ = make_images(classes=30, each=1)
    vectors, labels = np.repeat(centers, 3, 0), np.repeat(np.arange(30), 3)
    vectors[::3] += 1e-3  # one of three, for a same pair that is not exact
    calibration = calibrate(vectors, labels, fpir=(0.2,), gallery_images=2)
    (point,) = calibration.gallery
    unit = centers / np.linalg.norm(centers, axis=1, keepdims=True)
    nearest = np.sort((unit @ unit.T - 2 * np.eye(30)).max(1))[::-1]
    assert nearest[6] - 1e-3 < point.threshold < nearest[5] + 1e-3
    assert point.true_accepts == 1
    assert (calibration.gallery_classes, calibration.gallery_images) == (30, 2)


def test_isotonic_curve_equals_scikit_learn():
    rng = np.random.default_rng(0)
    centers = np.linspace(-1, 1, 50)
    same = rng.random(50) * np.linspace(0.1, 1, 50)
    different = rng.random(50) * np.linspace(1, 0.1, 50)
    same, different = same / same.sum(), different / different.sum()
    knots, log_odds = fitting._isotonic(centers, same, different)
    weight = same + different
    fitted = IsotonicRegression().fit(centers, same / weight, sample_weight=weight)
    expected = np.unique(fitted.predict(centers))
    assert len(knots) == len(expected)
    # Each count is raised by half of the smallest, so that no probability is 0 or 1.
    np.testing.assert_allclose(1 / (1 + np.exp(-log_odds)), expected, atol=0.02)


def test_beta_curve_equals_logistic_regression():
    rng = np.random.default_rng(0)
    same, different = rng.beta(4, 2, 3000), rng.beta(2, 4, 3000)
    edges = np.linspace(0, 1, 513)
    centers = (edges[1:] + edges[:-1]) / 2
    histograms = [np.histogram(values, edges)[0] / 3000 for values in (same, different)]
    knots, log_odds = fitting._beta(centers, *histograms)
    u = np.clip((centers - centers[0]) / (centers[-1] - centers[0]), 1e-3, 1 - 1e-3)
    features = np.tile(np.stack([np.log(u), -np.log1p(-u)], 1), (2, 1))
    model = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000)
    model.fit(features, np.repeat([1, 0], 512), sample_weight=np.concatenate(histograms))
    expected = model.decision_function(features[:512])
    np.testing.assert_allclose(log_odds, np.interp(knots, centers, expected), atol=1e-3)


def test_probability_is_monotone_and_shifts_with_the_prior():
    calibration = calibrate(*make_images())
    values = np.linspace(-1, 1, 1001)
    even, rare = calibration.probability(values), calibration.probability(values, 0.01)
    assert (np.diff(even) >= 0).all()
    assert even[0] < 0.1
    assert even[-1] > 0.9
    np.testing.assert_allclose(rare / (1 - rare) * 99, even / (1 - even), rtol=1e-6)
    with pytest.raises(ValueError, match="prior"):
        calibration.probability(0.5, prior=1)


def test_rates_and_probabilities_hold_on_other_classes():
    calibration = calibrate(*make_images(classes=80, each=12))
    result = evaluate_calibration(calibration, *make_images(classes=80, each=12, seed=1))
    assert [rate.target for rate in result.pairs] == [1e-2, 1e-3, 1e-4]
    for rate in result.pairs[:2] + result.gallery[:1]:
        assert rate.target / 2 < rate.false_accepts < 2 * rate.target
    assert result.error < 0.03
    assert calibration.calibration_error < 0.03
    assert sum(weight for _, _, weight in result.reliability) == pytest.approx(1)
    error = sum(weight * abs(p - share) for p, share, weight in result.reliability)
    assert error == pytest.approx(result.error)


def test_sample_of_many_images_has_many_classes(monkeypatch):
    monkeypatch.setattr(fitting, "_MAX_IMAGES", 100)
    codes = np.repeat(np.arange(90), [1] * 30 + [5] * 60)
    rows = fitting._sample_rows(codes, np.random.default_rng(0))
    sizes = np.bincount(codes[rows])
    assert len(rows) == 100
    assert (sizes[sizes > 0] == 2).all()
    assert calibrate(*make_images(classes=60, each=5)).images == 100


@pytest.mark.parametrize(
    ("vectors", "labels", "message"),
    [
        (torch.randn(20, 4), [0, 1] * 10, "at least 10 classes"),
        (torch.randn(40, 4), range(40), "at least 10 classes"),
        (torch.ones(40, 4), np.arange(40) % 20, "similarities are equal"),
        (torch.zeros(40, 4), np.arange(40) % 20, "similarities are equal"),
        (np.random.default_rng(0).normal(size=(400, 8)), np.arange(400) % 20, "do not separate"),
        (torch.full((40, 4), torch.nan), np.arange(40) % 20, "NaN"),
        (torch.randn(40, 4), [0], "labels"),
    ],
)
def test_degenerate_input_is_an_error(vectors, labels, message):
    with pytest.raises(ValueError, match=message):
        calibrate(vectors, labels)


def test_invalid_options_are_errors():
    vectors, labels = make_images()
    for options in ({"far": (0,)}, {"fpir": (1.5,)}, {"gallery_images": 0}, {"similarity": "dot"}):
        with pytest.raises(ValueError, match=r"far|gallery_images|similarity"):
            calibrate(vectors, labels, **options)


def test_equal_seeds_give_equal_calibrations():
    assert calibrate(*make_images()) == calibrate(*make_images())


def test_json_keeps_a_calibration_and_damage_is_an_error():
    calibration = calibrate(*make_images())
    document = json.loads(json.dumps(calibration.to_json()))
    assert Calibration.from_json(document) == calibration
    for damage in ({"pairs": None}, {"extra": 1}, {"similarities": [1, 1]}, {"log_odds": [0.5]}):
        with pytest.raises(ValueError, match="calibration is damaged"):
            Calibration.from_json({**document, **damage})
