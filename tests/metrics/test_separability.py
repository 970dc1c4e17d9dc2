from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry._util.tensors import nearest_other_class
from proximetry.metrics import distinct_proxies, proxy_separability, separability


def brute_force(proxies):
    """Every pair of classes, every pair of their proxies, in float64."""
    proxies = np.asarray(proxies, np.float64)
    if proxies.ndim == 2:
        proxies = proxies[:, None]
    lengths = np.linalg.norm(proxies, axis=2, keepdims=True)
    unit = proxies / np.where(lengths == 0, 1, lengths)
    classes = range(len(unit))
    return np.array([max((unit[i] @ unit[j].T).max() for j in classes if j != i) for i in classes])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    classes=st.integers(2, 40),
    per_class=st.sampled_from([None, 1, 2, 5]),
    width=st.integers(1, 6),
    side=st.sampled_from([1, 7, 16, 1024]),
)
def test_equals_brute_force(seed, classes, per_class, width, side):
    shape = (classes, width) if per_class is None else (classes, per_class, width)
    proxies = np.random.default_rng(seed).normal(size=shape)
    with pytest.MonkeyPatch.context() as patch:
        blocked = partial(nearest_other_class, block=side)
        patch.setattr(proxy_separability, "nearest_other_class", blocked)
        result = separability(proxies)
    expected = brute_force(proxies)
    np.testing.assert_allclose(result.per_class, expected, rtol=0, atol=1e-14)
    assert result.mean == pytest.approx(expected.mean(), abs=1e-14)


@pytest.mark.parametrize("block", [2, 8, None])
@pytest.mark.parametrize("per_class", [1, 2])
def test_equally_near_classes_are_ordered_by_index(block, per_class):
    """Few directions: every row has copies in many classes."""
    rows = torch.eye(4, dtype=torch.float64)[np.random.default_rng(0).integers(0, 4, 60)]
    cosines, nearest_rows = nearest_other_class(rows, per_class, block)
    for i, row in enumerate(rows):
        near = rows @ row
        near[i // per_class * per_class : (i // per_class + 1) * per_class] = -torch.inf
        assert cosines[i] == near.max()
        assert nearest_rows[i] == int((near == near.max()).nonzero()[0])


def test_zero_proxies_have_cosine_zero_and_copies_one():
    assert separability(torch.zeros(3, 4)).per_class.tolist() == [0.0, 0.0, 0.0]
    lone = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    assert separability(lone).per_class.tolist() == [0.0, 0.0, 0.0]
    assert separability(torch.full((2, 7), 0.1)).mean == pytest.approx(1, abs=1e-6)


def test_scores_are_the_mean_and_the_angles_in_degrees():
    angle = torch.tensor([0.0, 30.0, 100.0, 190.0]).deg2rad()
    scores = separability(torch.stack([angle.cos(), angle.sin()], 1)).scores()
    # The nearest other classes are 30, 30, 70 and 90 degrees away.
    assert scores["mean_angle"] == pytest.approx(55, abs=1e-4)
    assert scores["smallest_angle"] == pytest.approx(30, abs=1e-4)
    cosines = torch.tensor([30.0, 30.0, 70.0, 90.0]).deg2rad().cos()
    assert scores["separability"] == pytest.approx(cosines.mean().item(), abs=1e-6)


def count_groups(vectors, cosine):
    """Count the connected components of the graph of large cosines, one by one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(lengths == 0, 1, lengths)
    left, groups = set(range(len(units))), 0
    while left:
        groups += 1
        reached = [left.pop()]
        while reached:
            here = reached.pop()
            near = {other for other in left if units[here] @ units[other] >= cosine}
            left -= near
            reached += near
    return groups


@given(
    seed=st.integers(0, 2**32),
    classes=st.integers(1, 6),
    per_class=st.integers(1, 9),
    width=st.integers(1, 4),
    cosine=st.floats(-0.9, 0.99),
)
def test_distinct_proxies_are_groups_of_joined_ones(seed, classes, per_class, width, cosine):
    draw = np.random.default_rng(seed)
    proxies = draw.normal(size=(classes, per_class, width)) * draw.integers(
        0, 3, (classes, per_class, 1)
    )
    actual = distinct_proxies(proxies, cosine)
    assert actual.tolist() == [count_groups(own, cosine) for own in proxies]


@pytest.mark.parametrize(
    ("proxies", "message"),
    [
        (torch.ones(1, 4), "at least two"),
        (torch.ones(4, 0, 4), "at least one proxy"),
        (torch.ones(4), r"\(4,\)"),
        ([[1.0, 2.0]], "list"),
        (torch.ones(4, 4, dtype=torch.int64), "int64"),
        (torch.ones(5, 2, 3).index_fill(0, torch.tensor(3), torch.inf), "infinite .* 6, 7"),
    ],
)
def test_separability_rejects_invalid_proxies(proxies, message):
    with pytest.raises(ValueError, match=message):
        separability(proxies)
    with pytest.raises(ValueError, match=r"got shape \(3, 4\)"):
        distinct_proxies(torch.ones(3, 4))
