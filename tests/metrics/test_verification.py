import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import interp1d
from scipy.optimize import brentq
from sklearn import metrics as reference

from proximetry.metrics import (
    auc,
    draw_pairs,
    eer,
    error_versus_reject,
    pair_similarities,
    read_pairs,
    roc,
    tar_at_far,
    templates,
    verification_pairs,
    verification_rates,
    verify,
    verify_classes,
)


@st.composite
def scored(draw, least=2):
    """Similarities with many ties, and both kinds of pairs."""
    size = draw(st.integers(least, 60))
    scores = st.integers(-4, 4).map(lambda v: v / 4) if draw(st.booleans()) else st.floats(-1, 1)
    values = draw(st.lists(scores, min_size=size, max_size=size))
    same = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    same[0], same[-1] = True, False
    return np.array(values), np.array(same)


@settings(max_examples=150, deadline=None)
@given(scored())
def test_curve_and_areas_equal_scikit_learn(pairs):
    values, same = pairs
    curve = roc(values, same)
    far, tar, thresholds = reference.roc_curve(same, values, drop_intermediate=False)
    np.testing.assert_allclose(curve.far, far, rtol=0, atol=1e-15)
    np.testing.assert_allclose(curve.tar, tar, rtol=0, atol=1e-15)
    np.testing.assert_array_equal(curve.thresholds, thresholds)
    assert auc(values, same) == pytest.approx(reference.roc_auc_score(same, values), abs=1e-12)
    crossing = brentq(lambda x: 1 - x - interp1d(far, tar)(x), 0, 1, xtol=1e-14)
    # Interpolation fails where the curve is vertical.
    if len(np.unique(far)) == len(far):
        assert eer(values, same) == pytest.approx(crossing, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(scored())
def test_eer_lies_on_the_curve(pairs):
    """At the EER, interpolation between two neighboring thresholds makes both errors equal."""
    values, same = pairs
    curve, rate = roc(values, same), eer(values, same)
    errors = np.stack([curve.far, 1 - curve.tar], 1)
    for (far, frr), (next_far, next_frr) in itertools.pairwise(errors):
        if frr - far >= -1e-12 and next_frr - next_far <= 1e-12:
            gap = (frr - far) - (next_frr - next_far)
            share = (frr - far) / gap if gap else 0.0
            assert rate == pytest.approx(far + share * (next_far - far), abs=1e-12)
            break
    else:
        pytest.fail("the curve never crosses")


@settings(max_examples=100, deadline=None)
@given(scored(), st.sampled_from([0.5, 0.29, 0.25, 0.1, 1.0]))
def test_tar_at_far_tries_every_threshold(pairs, far):
    values, same = pairs
    different = int((~same).sum())
    if far * different < 1 - 1e-9:
        with pytest.raises(ValueError, match=f"with {different} different pairs"):
            tar_at_far(values, same, far)
        return
    best = 0.0
    for threshold in [*values, math.inf]:
        accepted = values >= threshold
        if (accepted & ~same).sum() <= far * different + 1e-9:
            best = max(best, (accepted & same).sum() / same.sum())
    assert tar_at_far(values, same, far) == pytest.approx(best, abs=1e-15)


def best_threshold(values, same):
    """Try every candidate; return the highest of the best."""
    distinct = sorted(set(values))
    middles = [(a + b) / 2 for a, b in itertools.pairwise(distinct)]
    candidates = [-math.inf, *middles, math.inf]
    return max(candidates, key=lambda t: (int(((values >= t) == same).sum()), t))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_folds_choose_their_threshold_on_the_others(data):
    folds = data.draw(st.integers(2, 5))
    blocks = [data.draw(scored()) for _ in range(folds)]
    values = np.round(np.concatenate([block[0] for block in blocks]) * 64) / 64
    same = np.concatenate([block[1] for block in blocks])
    ids = np.repeat(np.arange(folds), [len(block[0]) for block in blocks])
    shuffled = np.random.default_rng(0).permutation(len(values))
    names = np.array([f"fold {i}" for i in ids])
    result = verify(values[shuffled], same[shuffled], folds=names[shuffled])
    accuracies = []
    for fold in range(folds):
        inside = ids == fold
        threshold = best_threshold(values[~inside], same[~inside])
        assert result.thresholds[fold] == threshold
        accuracies.append(np.mean((values[inside] >= threshold) == same[inside]))
    np.testing.assert_allclose(result.fold_accuracies, accuracies, atol=1e-15)
    assert result.accuracy == pytest.approx(np.mean(accuracies), abs=1e-15)
    spread = np.std(accuracies, ddof=1) / np.sqrt(folds)
    assert result.standard_error == pytest.approx(spread, abs=1e-15)
    assert result.auc == auc(values, same)
    assert result.eer == eer(values, same)
    assert (result.same_pairs, result.different_pairs) == (same.sum(), (~same).sum())


def test_rates_that_cannot_be_measured_are_flagged():
    same = np.tile([True, False], 25)
    values = np.linspace(0, 1, 50)
    result = verify(values, same, folds=5, far=(0.2, 0.04, 0.01))
    assert set(result.tar_at_far) == {0.2, 0.04}
    assert result.unmeasurable_far == (0.01,)
    assert "0.01 not measurable with 25 different pairs" in str(result)
    assert result.tar_at_far[0.2] == tar_at_far(values, same, 0.2)
    for far in (0, -0.1, 1.5, math.nan):
        with pytest.raises(ValueError, match="far"):
            tar_at_far(values, same, far)


def test_perfect_and_reversed():
    same = np.tile([True, False], 20)
    perfect = verify(same * 1.0, same)
    assert (perfect.accuracy, perfect.standard_error, perfect.auc, perfect.eer) == (1, 0, 1, 0)
    assert perfect.thresholds.tolist() == [0.5] * 10
    assert auc(1.0 - same, same) == 0
    assert eer(1.0 - same, same) == 1
    assert auc(np.zeros(40), same) == eer(np.zeros(40), same) == 0.5


def test_neighboring_floats_are_separated():
    low = 0.1
    high = np.nextafter(low, 1)
    same = np.tile([True, False], 4)
    assert verify(np.where(same, high, low), same, folds=4).accuracy == 1.0


@pytest.mark.parametrize("similarity", ["cosine", "euclidean", "dot"])
def test_pair_similarities(similarity, monkeypatch):
    monkeypatch.setattr(verification_pairs, "_TILE", {"cpu": 50, "cuda": 50})
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(12, 7))
    vectors[3] = 0
    pairs = rng.integers(0, 12, (40, 2))
    left, right = vectors[pairs[:, 0]], vectors[pairs[:, 1]]
    expected = {
        "dot": (left * right).sum(1),
        "euclidean": -np.linalg.norm(left - right, axis=1),
        "cosine": (left * right).sum(1)
        / np.maximum(np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1), 1e-300),
    }[similarity]
    actual = pair_similarities(vectors, pairs, similarity=similarity)
    np.testing.assert_allclose(actual.numpy(), expected, atol=1e-13)
    stored = torch.tensor(vectors, dtype=torch.float16)
    half = pair_similarities(stored, torch.tensor(pairs), similarity=similarity)
    assert half.dtype == torch.float32
    np.testing.assert_allclose(half.numpy(), expected, atol=2e-2)


GOOD = "2\t2\nAnn_A\t1\t2\nBo\t3\t1\nAnn_A\t1\tBo\t3\nCy\t1\tAnn_A\t2\n"
GOOD += "Cy\t1\t4\nDi\t1\t2\nCy\t4\tDi\t2\nDi\t1\tBo\t3\n"


def test_read_pairs(tmp_path):
    path = tmp_path / "pairs.txt"
    for text in (GOOD, GOOD.replace("\t", "  "), GOOD.replace("\n", "\r\n") + "\n\n"):
        path.write_bytes(text.encode())
        protocol = read_pairs(path)
        assert protocol.images[:4] == (("Ann_A", 1), ("Ann_A", 2), ("Bo", 3), ("Bo", 1))
        assert protocol.files[0] == "Ann_A/Ann_A_0001.jpg"
        assert protocol.same.tolist() == [True, True, False, False] * 2
        assert protocol.folds.tolist() == [0] * 4 + [1] * 4
        assert protocol.pairs[:4].tolist() == [[0, 1], [2, 3], [0, 2], [4, 1]]
        assert len(set(protocol.images)) == len(protocol.images) == 8
    similarities = pair_similarities(torch.eye(8), protocol.pairs)
    assert len(verify(similarities, protocol.same, folds=protocol.folds).thresholds) == 2
    path.write_text("1\nAnn 1 2\nAnn 1 Bo 1\n")
    assert read_pairs(path).folds.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("2\t2\n", "two\t2\n", "line 1: expected the number of folds"),
        ("2\t2\n", "0\t2\n", "line 1: expected the number of folds"),
        ("2\t2\n", "2\t3\n", "got 8"),
        ("Bo\t3\t1\n", "Bo\t3\n", r"line 3: expected 'name i j' \(same person\)"),
        ("Bo\t3\t1\n", "Bo\t3\tCy\t1\n", "line 3: expected 'name i j'"),
        ("Bo\t3\t1\n", "Bo\t3\tx\n", "line 3: .*'x'"),
        ("Bo\t3\t1\n", "Bo\t3\t0\n", "line 3: .*'0'"),
        ("Bo\t3\t1\n", "Bo\t3\t3\n", "line 3: .* an image with itself"),
        ("Ann_A\t1\tBo\t3", "Ann_A\t1\t3", r"line 4: expected 'name1 i name2 j'"),
        ("Ann_A\t1\tBo\t3", "Bo\t1\tBo\t3", "line 4: .* different people"),
        (GOOD, "\n", "is empty"),
    ],
)
def test_read_pairs_rejects_malformed_lines(tmp_path, old, new, message):
    path = tmp_path / "pairs.txt"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        read_pairs(path)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(1, 6), min_size=4, max_size=30).filter(
        lambda n: sum(m > 1 for m in n) > 1
    ),
    st.integers(2, 12),
    st.integers(0, 1000),
)
def test_drawn_pairs_are_balanced_and_folds_share_no_class_pair(sizes, folds, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    drawn = draw_pairs(labels, pairs=120, folds=folds, seed=seed)
    first, second = labels[drawn.pairs].T
    np.testing.assert_array_equal(first == second, drawn.same)
    assert (drawn.pairs[:, 0] != drawn.pairs[:, 1]).all()
    count = drawn.folds.max() + 1
    assert count == min(folds, sum(n > 1 for n in sizes))
    classes = np.sort(labels[drawn.pairs], axis=1)
    for fold in range(count):
        inside = drawn.folds == fold
        assert drawn.same[inside].mean() == 0.5
        assert not {*map(tuple, classes[inside])} & {*map(tuple, classes[~inside])}
        if len(sizes) >= 10 * folds:
            assert not {*classes[inside].ravel()} & {*classes[~inside].ravel()}
    again = draw_pairs(labels.astype(str), pairs=120, folds=folds, seed=seed)
    assert len(again.pairs) == len(drawn.pairs)
    repeated = draw_pairs(labels, pairs=120, folds=folds, seed=seed)
    np.testing.assert_array_equal(repeated.pairs, drawn.pairs)


def test_classes_are_verified_by_drawn_pairs():
    labels = np.repeat(np.arange(40), 5)
    apart = verify_classes(np.eye(40)[labels], labels)
    assert (apart.accuracy, len(apart.fold_accuracies)) == (1.0, 10)
    assert (apart.same_pairs, apart.different_pairs) == (3000, 3000)
    nothing = verify_classes(np.random.default_rng(0).normal(size=(200, 8)), labels)
    assert nothing.accuracy == pytest.approx(0.5, abs=0.03)
    for few in ([0, 0, 1, 1, 2], [0, 0, 1, 2, 3]):
        with pytest.raises(ValueError, match="four classes"):
            draw_pairs(few)
    for wrong in ({"folds": 1}, {"pairs": -5}):
        with pytest.raises(ValueError, match="must be an integer of"):
            draw_pairs(labels, **wrong)


def ten_classes(seed):
    """Vectors of 10 classes x 20 with two pairs of classes that are hard to separate."""
    draw = np.random.default_rng(seed)
    centers = draw.standard_normal((10, 16))
    centers[1] = centers[0] + 0.3 * draw.standard_normal(16)
    centers[3] = centers[2] + 0.5 * draw.standard_normal(16)
    labels = np.repeat(np.arange(10), 20)
    return centers[labels] + 0.8 * draw.standard_normal((200, 16)), labels


@pytest.mark.parametrize("data_seed", range(3))
def test_verification_of_few_classes_depends_little_on_the_seed(data_seed):
    vectors, labels = ten_classes(data_seed)
    results = [verify_classes(vectors, labels, seed=seed) for seed in range(6)]
    accuracies = np.array([result.accuracy for result in results])
    assert np.ptp(accuracies) < 0.015
    every = np.stack(np.triu_indices(len(labels), 1), axis=1)
    curve = roc(pair_similarities(vectors, every), labels[every[:, 0]] == labels[every[:, 1]])
    balanced = (curve.tar + 1 - curve.far) / 2
    assert accuracies.mean() == pytest.approx(balanced.max(), abs=0.01)
    assert results[0].threshold == pytest.approx(curve.thresholds[balanced.argmax()], abs=0.1)


VALUES, SAME = np.linspace(0, 1, 20), np.tile([True, False], 10)
BROKEN = np.where(np.isin(np.arange(20), (4, 7)), np.nan, VALUES)


@pytest.mark.parametrize("function", [verify, roc, auc, eer])
@pytest.mark.parametrize(
    ("values", "same", "message"),
    [
        (VALUES, np.ones(20, bool), "the same"),
        (VALUES, np.zeros(20, bool), "different"),
        (VALUES, SAME[:19], r"\(19,\) for 20"),
        (np.ones((2, 2)), np.ones((2, 2), bool), "list of numbers"),
        ([], [], "list of numbers"),
        (VALUES, np.arange(20), "True or False"),
        (BROKEN, SAME, "rows 4, 7"),
    ],
)
def test_verification_rejects_invalid_pairs(function, values, same, message):
    with pytest.raises(ValueError, match=message):
        function(values, same)


@pytest.mark.parametrize(
    ("same", "folds", "message"),
    [
        (SAME, 1, "got 1"),
        (SAME, 21, "got 21"),
        (np.arange(20) < 10, 10, "fold 0 lacks"),
        (SAME, ["b" if i == 4 else "a" for i in range(20)], "fold 'b' lacks"),
        (SAME, [3] * 20, "at least two folds"),
        (SAME, [1] * 19, "folds has 19 entries"),
    ],
)
def test_verify_rejects_invalid_folds(same, folds, message):
    with pytest.raises(ValueError, match=message):
        verify(VALUES, same, folds=folds)


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([[0, 1], [0, 4]], {}, r"pair 1 is \(0, 4\)"),
        ([[-1, 2]], {}, r"pair 0 is \(-1, 2\)"),
        ([[0, 1]], {"similarity": "manhattan"}, "'manhattan'"),
        ([0, 1], {}, r"\[M, 2\]"),
        (np.empty((0, 2), int), {}, r"\[M, 2\]"),
        ([[0.0, 1.0]], {}, "integers"),
    ],
)
def test_pair_similarities_rejects_invalid_pairs(pairs, options, message):
    with pytest.raises(ValueError, match=message):
        pair_similarities(torch.randn(4, 3), pairs, **options)


def test_templates_are_normalized_weighted_means(monkeypatch):
    monkeypatch.setattr(verification_pairs, "_TILE", {"cpu": 12, "cuda": 12})
    rng = np.random.default_rng(0)
    vectors, weights = rng.normal(size=(20, 5)), rng.random(20)
    ids = np.array([f"video {i}" for i in rng.integers(0, 6, 20)])
    for given_weights in (None, weights, torch.tensor(weights)):
        pooled = templates(vectors, ids, given_weights)
        assert pooled.ids.tolist() == sorted(set(ids))
        for i, name in enumerate(pooled.ids):
            used = weights if given_weights is not None else np.ones(20)
            mean = np.average(vectors[ids == name], axis=0, weights=used[ids == name])
            np.testing.assert_allclose(
                pooled.vectors[i].numpy(), mean / np.linalg.norm(mean), atol=1e-14
            )
            assert pooled.counts[i] == (ids == name).sum()
    target = [[ids[3], ids[5]], [ids[0], ids[3]]]
    assert pooled.ids[pooled.rows(target)].tolist() == target
    with pytest.raises(ValueError, match="'nobody'"):
        pooled.rows(["nobody"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: templates(x, [0, 0, 1]), "template_ids has 3 entries"),
        (lambda x: templates(x, [0, 0, 1, 1], [1, 1, 0, 0]), "template 1"),
        (lambda x: templates(x, [0, 0, 1, 1], [1, 1, -1, 0]), "row 2"),
        (lambda x: templates(x, [0, 0, 1, 1], [1, 1]), "one per row"),
    ],
)
def test_templates_reject_invalid_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(4, 3))


def test_error_versus_reject_equals_plain_loops():
    rng = np.random.default_rng(0)
    for count in (30, 400):
        same = rng.random(count) < 0.5
        quality = rng.integers(0, 20, (count, 2)).astype(float)  # with ties
        scores = rng.normal(size=count) + same * quality.min(1) / 5
        curve = error_versus_reject(scores, same, quality, far=0.1, reject=(0, 0.29, 0.5, 0.9))
        accepted = int(0.1 * (~same).sum())
        bound = np.sort(scores[~same])[::-1][accepted]
        assert curve.threshold == min(s for s in scores if s > bound)
        for limit, rejected, fnmr, fmr in zip(
            (0, 0.29, 0.5, 0.9), curve.rejected, curve.fnmr, curve.fmr, strict=True
        ):
            kept = [
                row
                for row in range(count)
                # Rejecting it with all of its quality would reject too many.
                if sum(quality.min(1) <= min(quality[row])) > np.floor(limit * count + 1e-9)
            ]
            assert rejected == pytest.approx(1 - len(kept) / count)
            assert rejected <= limit + 1e-9
            misses = [scores[row] < curve.threshold for row in kept if same[row]]
            accepts = [scores[row] >= curve.threshold for row in kept if not same[row]]
            for rate, wrong in ((fnmr, misses), (fmr, accepts)):
                assert rate == pytest.approx(np.mean(wrong) if wrong else np.nan, nan_ok=True)
        one = error_versus_reject(scores, same, quality.min(1), far=0.1, reject=(0.29,))
        assert one.fnmr == curve.fnmr[1]
    # A useful quality lowers the error.
    assert curve.fnmr[2] < curve.fnmr[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quality": [1, 2]}, "finite number per pair"),
        ({"quality": [1, 2, 3, np.nan]}, "finite number per pair"),
        ({"reject": (0.5, 1)}, "fractions from 0"),
        ({"far": 0.1}, "not measurable"),
    ],
)
def test_error_versus_reject_raises(options, message):
    values = {"quality": [1, 2, 3, 4], "far": 0.5} | options
    with pytest.raises(ValueError, match=message):
        error_versus_reject([0.1, 0.2, 0.3, 0.4], [1, 0, 1, 0], **values)


def test_rates_without_folds_equal_those_of_verify():
    rng = np.random.default_rng(0)
    same = rng.random(200) < 0.5
    scores = rng.normal(size=200) + same
    rates, result = (
        verification_rates(scores, same, (0.1, 1e-4)),
        verify(scores, same, far=(0.1, 1e-4)),
    )
    assert (rates.auc, rates.eer, rates.tar_at_far) == (result.auc, result.eer, result.tar_at_far)
    assert rates.unmeasurable_far == (1e-4,)
    assert str(rates) in str(result)
