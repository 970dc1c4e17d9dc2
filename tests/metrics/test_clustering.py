import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as reference
from sklearn.cluster import KMeans

from proximetry.metrics import ami, cluster, clustering, kmeans, nmi, pairwise_f1

labelings = st.integers(2, 60).flatmap(
    lambda size: st.tuples(
        *(st.lists(st.integers(0, 12), min_size=size, max_size=size) for _ in range(2))
    )
)


def pairs_by_hand(true, pred):
    both = together = belong = 0
    for (a, b), (c, d) in itertools.combinations(zip(true, pred, strict=True), 2):
        both += a == c and b == d
        together += b == d
        belong += a == c
    return both, together, belong


@settings(max_examples=150, deadline=None)
@given(labelings)
def test_scores_equal_scikit_learn(both):
    true, pred = both
    for average in ("arithmetic", "geometric"):
        expected = reference.normalized_mutual_info_score(true, pred, average_method=average)
        assert nmi(true, pred, average) == pytest.approx(expected, abs=1e-9)
    expected = reference.adjusted_mutual_info_score(true, pred)
    assert ami(true, pred) == pytest.approx(expected, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(labelings)
def test_pairwise_f1_counts_pairs(both):
    true, pred = both
    right, together, belong = pairs_by_hand(true, pred)
    scores = pairwise_f1(true, pred)
    if not together and not belong:
        assert scores == (1.0, 1.0, 1.0)
        return
    assert scores.precision == (right / together if together else 0)
    assert scores.recall == (right / belong if belong else 0)
    assert scores.f1 == pytest.approx(2 * right / (together + belong), abs=1e-15)


@settings(max_examples=60, deadline=None)
@given(labelings, st.randoms(use_true_random=False))
def test_scores_are_symmetric_and_independent_of_names(both, random):
    true, pred = both
    names = random.sample(["p", "q", "Σ", *map(str, range(10))], 13)
    renamed = [names[value] for value in pred]
    assert nmi(true, renamed) == pytest.approx(nmi(pred, true), abs=1e-12)
    assert ami(true, renamed) == pytest.approx(ami(pred, true), abs=1e-12)
    assert pairwise_f1(true, renamed).precision == pairwise_f1(pred, true).recall


def exact_expected_mutual_information(a_sizes, b_sizes):
    """The defining sum with whole-number binomials."""
    total, parts = sum(a_sizes), []
    for a, b in itertools.product(a_sizes, b_sizes):
        for n in range(max(1, a + b - total), min(a, b) + 1):
            ways = math.comb(a, n) * math.comb(total - a, b - n)
            parts.append(ways / math.comb(total, b) * n / total * math.log(total * n / (a * b)))
    return math.fsum(parts)


@pytest.mark.parametrize(
    ("a_sizes", "b_sizes"),
    [
        ([1] * 300, [300]),
        ([250, 50], [100, 100, 100]),
        ([299, 1], [7] * 42 + [6]),
        ([5] * 60, [60] * 5),
    ],
)
def test_expected_mutual_information_is_exact(a_sizes, b_sizes):
    true, pred = (np.repeat(np.arange(len(s)), s) for s in (a_sizes, b_sizes))
    actual = clustering._expected_mutual_information(clustering._table(true, pred))
    assert actual == pytest.approx(exact_expected_mutual_information(a_sizes, b_sizes), rel=1e-12)


def test_corner_cases_of_scores():
    one, apart, split = [0] * 6, list(range(6)), [0, 0, 0, 1, 1, 1]
    for same in (one, apart, split):
        assert nmi(same, same) == nmi(same, same, "geometric") == ami(same, same) == 1.0
        assert pairwise_f1(same, same) == (1.0, 1.0, 1.0)
    assert nmi(one, split) == nmi(split, one, "geometric") == ami(one, split) == 0.0
    assert ami(apart, split) == pytest.approx(0, abs=1e-12)
    assert pairwise_f1(apart, split) == (0.0, 0.0, 0.0)
    assert pairwise_f1(split, one) == (6 / 15, 1.0, 4 / 7)
    assert nmi([0, 0, 1, 1], [0, 1, 0, 1]) == 0.0


def test_clustering_rejects_invalid_labels():
    with pytest.raises(ValueError, match="labels_pred has 2 entries"):
        nmi([0, 1, 2], [0, 1])
    with pytest.raises(ValueError, match="empty"):
        ami([], [])
    with pytest.raises(ValueError, match="'harmonic'"):
        nmi([0, 1], [0, 1], "harmonic")
    with pytest.raises(ValueError, match="integers or strings"):
        pairwise_f1([0.5, 1.0], [0, 1])


def blobs(classes, each, width=8, spread=0.1, seed=0):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(classes, width)) * 3
    labels = rng.permutation(np.repeat(np.arange(classes), each))
    return (centers[labels] + spread * rng.normal(size=(len(labels), width))), labels


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    width=st.integers(1, 4),
    share=st.floats(0, 1),
    whole=st.booleans(),
)
def test_kmeans_matches_its_definition(seed, rows, width, share, whole):
    """Against the definition: means, nearest centers, inertia; with duplicates and N = k too."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 3, (rows, width)) * 1.0 if whole else rng.normal(size=(rows, width))
    clusters = max(1, round(share * rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clustering, "_TILE", {"cpu": 16, "cuda": 16})
        result = kmeans(values, clusters, seed=seed % 1000)
    assigned, centers = result.assignments, result.centers
    used = np.unique(assigned)
    assert result.converged
    assert len(used) == min(clusters, len(np.unique(values, axis=0)))
    for j in used:
        np.testing.assert_allclose(centers[j], values[assigned == j].mean(0), atol=1e-12)
    apart = ((values[:, None] - centers[None]) ** 2).sum(2)
    own = apart[np.arange(rows), assigned]
    assert (own <= apart[:, used].min(1) + 1e-12).all()
    assert result.inertia == pytest.approx(own.sum(), abs=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_kmeans_finds_blobs(dtype):
    values, labels = blobs(12, 9)
    stored = torch.from_numpy(values).to(dtype)
    result = min((kmeans(stored, 12, seed=seed) for seed in range(4)), key=lambda run: run.inertia)
    assert ami(labels, result.assignments) == 1.0
    assert result.centers.dtype == (np.float64 if dtype == torch.float64 else np.float32)


def test_kmeans_is_repeatable():
    values, _ = blobs(10, 20, spread=2.0)
    first, again = (kmeans(values, 10, seed=3) for _ in range(2))
    assert np.array_equal(first.assignments, again.assignments)
    assert np.array_equal(first.centers, again.centers)
    short = kmeans(values, 10, seed=3, iterations=1)
    assert not short.converged
    assert short.iterations == 1
    assert short.inertia >= first.inertia


def test_kmeans_is_invariant_to_offset_and_scale():
    values, _ = blobs(6, 10, spread=1.0)
    plain = kmeans(values, 6)
    assert np.array_equal(kmeans(values + 1e6, 6).assignments, plain.assignments)
    for scale in (2.0**-40, 2.0**40):
        actual = kmeans(values.astype("f4") * np.float32(scale), 6)
        assert np.array_equal(actual.assignments, plain.assignments)
        np.testing.assert_allclose(actual.centers, plain.centers * scale, rtol=1e-4)
        assert actual.inertia == pytest.approx(plain.inertia * scale**2, rel=1e-5)
    with pytest.raises(ValueError, match="overflow"):
        kmeans(values * 1e160, 6)


def test_empty_clusters_are_filled_from_the_farthest_rows():
    rows = torch.tensor([[0.0], [0.1], [0.2], [5.0], [0.0]])
    centers = torch.tensor([[0.05], [9.0], [-9.0]])
    filled = clustering._fill_empty(rows, centers, torch.zeros(5, dtype=torch.int64))
    assert filled.tolist() == [0, 0, 2, 1, 0]
    copies = torch.ones(4, 1)
    remaining = clustering._fill_empty(copies, torch.ones(2, 1), torch.zeros(4, dtype=torch.int64))
    assert remaining.tolist() == [0, 0, 0, 0]


def test_kmeans_rejects_invalid_input():
    values = torch.randn(5, 3)
    for clusters in (0, 6, 2.5, None):
        with pytest.raises(ValueError, match=rf"clusters .*{clusters}"):
            kmeans(values, clusters)
    with pytest.raises(ValueError, match="iterations"):
        kmeans(values, 2, iterations=0)
    values[3, 1] = torch.nan
    with pytest.raises(ValueError, match=r"NaN .* 3\."):
        kmeans(values, 2)


def test_cluster_reports_the_four_scores():
    values, labels = blobs(8, 6, spread=1.5)
    names = np.array([f"bird {label}" for label in labels])
    scores = cluster(values.astype("f4"), names, seed=1)
    actual = kmeans(values.astype("f4"), 8, seed=1).assignments
    assert scores == {
        "nmi": nmi(labels, actual),
        "nmi_geometric": nmi(labels, actual, "geometric"),
        "ami": ami(labels, actual),
        "f1": pairwise_f1(labels, actual).f1,
    }
    assert 0 < scores["ami"] < scores["nmi"] < 1
    assert set(cluster(np.eye(4), [1, 2, 3, 4]).values()) == {1.0}  # every item its own class
    assert set(cluster(np.eye(4), ["a"] * 4).values()) == {1.0}  # a single class
    with pytest.raises(ValueError, match="labels has 3 entries"):
        cluster(values, labels[:3])


@pytest.mark.parametrize(
    ("classes", "each", "width", "spread", "more"),
    # Inertia may be larger by chance by this fraction: three standard errors over five seeds.
    [(300, 5, 32, 3.0, 0.01), (40, 25, 8, 1.5, 0.04), (8, 200, 16, 3.0, 0.04)],
)
def test_kmeans_is_as_good_as_scikit_learn(classes, each, width, spread, more):
    values, labels = blobs(classes, each, width, spread)

    def reference_kmeans(seed):
        return KMeans(classes, n_init=1, random_state=seed, algorithm="lloyd").fit(values)

    runs = [(kmeans(values, classes, seed=seed), reference_kmeans(seed)) for seed in range(5)]
    inertia, expected = np.mean([(ours.inertia, ref.inertia_) for ours, ref in runs], axis=0)
    assert inertia < (1 + more) * expected
    quality, expected = np.mean(
        [(nmi(labels, ours.assignments), nmi(labels, ref.labels_)) for ours, ref in runs], axis=0
    )
    assert quality > expected - 0.02
