import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry.metrics import identification
from proximetry.metrics.identification import identify

SIMILARITIES = ("cosine", "euclidean", "dot")


def near(probe, others, similarity):
    """Brute force in float64."""
    probe, others = np.asarray(probe, np.float64), np.asarray(others, np.float64)
    if similarity == "dot":
        return others @ probe
    if similarity == "euclidean":
        return -np.sqrt(((others - probe) ** 2).sum(1))
    lengths = np.linalg.norm(others, axis=1) * np.linalg.norm(probe)
    return others @ probe / np.where(lengths == 0, 1, lengths)


def brute_force(probes, labels, gallery, gallery_labels, distractors, similarity, own):
    rows = []
    for i, label in enumerate(labels):
        pool = distractors
        if pool is None:
            pool = gallery[[other != label for other in gallery_labels]]
        against = near(probes[i], pool, similarity)
        mates = near(probes[i], gallery, similarity)
        for j, other in enumerate(gallery_labels):
            if other == label and not (own and i == j):
                rows.append((i, j, 1 + int((against >= mates[j] - 1e-12).sum())))
    return rows


def brute_tar(probes, labels, gallery, gallery_labels, distractors, similarity, own, far):
    """Try every threshold there is on the list of all pairs."""
    genuine, impostors = [], []
    for i, label in enumerate(labels):
        mates = near(probes[i], gallery, similarity)
        same = np.array([other == label for other in gallery_labels])
        others = mates[~same] if distractors is None else near(probes[i], distractors, similarity)
        impostors.extend(others)
        same &= np.arange(len(same)) != (i if own else -1)
        genuine.extend(mates[same])
    genuine, impostors = np.array(genuine), np.array(impostors)
    allowed = [t for t in genuine if (impostors >= t - 1e-12).sum() <= far * len(impostors) + 1e-9]
    if far * len(impostors) < 1 - 1e-9:
        return None, len(impostors)
    lowest = min(allowed, default=np.inf)
    return float((genuine >= lowest - 1e-12).mean()), len(impostors)


def as_rows(result):
    trials = zip(result.probes.tolist(), result.mates.tolist(), result.ranks.tolist(), strict=True)
    return sorted(trials)


@pytest.fixture
def tiny_tiles(monkeypatch):
    monkeypatch.setattr(identification, "_PROBES", {"cpu": 3, "cuda": 3})
    monkeypatch.setattr(identification, "_DISTRACTORS", {"cpu": 4, "cuda": 4})
    monkeypatch.setattr(identification, "_TRIALS", 5)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    similarity=st.sampled_from(SIMILARITIES),
    own=st.booleans(),
    closed=st.booleans(),
)
def test_equals_brute_force_with_ties(data, similarity, own, closed):
    """Whole numbers in a small range: many exact ties, exact arithmetic."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    width = data.draw(st.integers(1, 4))

    def draw(count):
        return rng.integers(-2, 3, (count, width)).astype(np.float32)

    count, gallery_rows = data.draw(st.integers(2, 12)), data.draw(st.integers(1, 12))
    probes, labels = draw(count), rng.integers(0, 4, count)
    labels[1] = labels[0]  # at least one mate
    gallery, gallery_labels = draw(gallery_rows), rng.integers(0, 4, gallery_rows)
    gallery_labels[0] = labels[0]
    if own:
        gallery, gallery_labels = probes, labels
    distractors = None if closed else draw(data.draw(st.integers(1, 15)))
    given = probes, labels, gallery, gallery_labels, distractors, similarity, own
    expected = brute_force(*given)
    options = {"distractors": distractors, "far": (0.5, 0.1, 0.02), "similarity": similarity}
    result = identify(*given[: 2 if own else 4], **options)
    for far in (0.5, 0.1, 0.02):
        tar, pairs = brute_tar(*given, far)
        assert result.impostor_pairs == pairs
        assert result.tar_at_far.get(far) == tar
        assert (far in result.unmeasurable_far) == (tar is None)
    assert as_rows(result) == sorted(expected)
    ranks = np.array([rank for _, _, rank in expected])
    assert result.rates == {k: np.mean(ranks <= k) for k in (1, 5, 10)}
    with_mate = {probe for probe, _, _ in expected}
    assert result.probes_without_mate == count - len(with_mate)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), similarity=st.sampled_from(SIMILARITIES), closed=st.booleans())
def test_probe_in_the_gallery_is_excluded(seed, similarity, closed):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-2, 3, (14, 3)).astype(np.float32)
    labels = rng.integers(0, 3, 14)
    query_rows = rng.choice(14, 9, replace=False)
    gallery_rows = rng.choice(14, 11, replace=False)
    distractors = None if closed else rng.integers(-2, 3, (6, 3)).astype(np.float32)
    expected, pairs = [], 0
    for i, row in enumerate(query_rows):
        pool = rows[gallery_rows[labels[gallery_rows] != labels[row]]] if closed else distractors
        pairs += len(pool)
        against = near(rows[row], pool, similarity)
        for j, other in enumerate(gallery_rows):
            if labels[other] == labels[row] and other != row:
                (mate,) = near(rows[row], rows[[other]], similarity)
                expected.append((i, j, 1 + int((against >= mate - 1e-12).sum())))
    result = identify(
        rows[query_rows],
        labels[query_rows],
        rows[gallery_rows],
        labels[gallery_rows],
        distractors=distractors,
        similarity=similarity,
        ignore_groups=query_rows,
        gallery_ignore_groups=gallery_rows,
    )
    assert as_rows(result) == expected
    assert result.impostor_pairs == pairs


def test_groups_exclude_distractors():
    rows, labels, groups = np.eye(3, dtype=np.float32)[[0, 0, 0, 1]], [0, 0, 1, 0], [5, 6, 5, 7]
    ranks = {(i, j): rank for i, j, rank in as_rows(identify(rows, labels, ignore_groups=groups))}
    assert ranks[0, 1] == 1  # the third row is as near, but in the group of the first
    assert ranks[1, 0] == 2
    # The third row and the others are impostors of each other, but it shares the first row's group.
    assert identify(rows, labels, ignore_groups=groups).impostor_pairs == 6 - 2
    with pytest.raises(ValueError, match="gallery_ignore_groups"):
        identify(rows, labels, rows, labels, ignore_groups=groups)
    with pytest.raises(ValueError, match="gallery_ignore_groups"):
        identify(rows, labels, gallery_ignore_groups=groups)


@pytest.mark.parametrize("similarity", SIMILARITIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_real_numbers_over_many_tiles(similarity, dtype, tiny_tiles):
    torch.manual_seed(0)
    probes = torch.randn(20, 9).to(dtype)
    labels = torch.arange(20) // 4
    distractors = torch.randn(57, 9).to(dtype)
    people = probes.double().numpy(), labels.tolist()
    given = *people, *people, distractors.double().numpy(), similarity, True
    seen = []
    result = identify(
        probes,
        labels,
        distractors=distractors,
        far=(0.5, 0.01),
        similarity=similarity,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert as_rows(result) == sorted(brute_force(*given))
    assert result.distractors == 57
    assert seen == [(done, 57) for done in (*range(4, 57, 4), 57)]
    assert result.impostor_pairs == 20 * 57
    for far in (0.5, 0.01):
        assert (result.tar_at_far[far], 20 * 57) == brute_tar(*given, far)


def test_copies_of_the_mate_tie_and_count_against_the_probe():
    """Rounding must not break ties between copies, wherever they stand in a tile."""
    torch.manual_seed(0)
    probes, mates = torch.randn(40, 128), torch.randn(40, 128)
    labels = [f"person {i}" for i in range(40)]
    # Powers of two scale exactly, so the cosine of a scaled copy is the same number.
    distractors = torch.cat([mates * 4, torch.randn(13, 128) * 1e-3, mates / 8, mates[:7]])
    result = identify(probes, labels, mates, labels, distractors=distractors)
    similar = torch.nn.functional.cosine_similarity(
        probes.double()[:, None], torch.cat([mates, distractors]).double()[None], dim=2
    )
    against = (similar[:, 40:] >= similar[:, :40].diagonal()[:, None] - 1e-12).sum(1)
    assert result.ranks.tolist() == (1 + against).tolist()
    assert (against >= 2).all()


def test_near_ties_are_ordered_exactly():
    """Distractors one float32 step from the mate are on the right side of it."""
    torch.manual_seed(1)
    probe, mate = torch.ones(1, 64), torch.rand(1, 64) + 1
    above = torch.nextafter(mate, torch.full_like(mate, 9.0))
    below = torch.nextafter(mate, torch.zeros_like(mate))
    for similarity, others in (("dot", [above, below]), ("euclidean", [below, above])):
        for other, rank in zip(others, (2, 1), strict=True):
            result = identify(probe, [0], mate, [0], distractors=other, similarity=similarity)
            assert result.ranks.tolist() == [rank]


def test_distractors_as_matrix_blocks_and_memmap_agree(tmp_path, tiny_tiles):
    rng = np.random.default_rng(0)
    probes, labels = rng.normal(size=(10, 6)).astype("f4"), np.arange(10) % 3
    distractors = rng.normal(size=(41, 6)).astype("f4")
    np.save(tmp_path / "d.npy", distractors)
    mapped = np.load(tmp_path / "d.npy", mmap_mode="r")
    forms = [
        distractors,
        torch.from_numpy(distractors),
        mapped,
        (distractors[at : at + 7] for at in range(0, 41, 7)),
        [torch.from_numpy(distractors[:40]), distractors[40:]],
    ]
    results = [identify(probes, labels, distractors=form, far=(0.2, 0.01)) for form in forms]
    assert {str(result) for result in results} == {str(results[0])}
    for result in results:
        assert np.array_equal(result.ranks, results[0].ranks)
        assert result.distractors == 41


MEMORY = """
import resource, sys
import numpy as np
import torch
from proximetry.metrics import identify

torch.set_num_threads(1)
rng = np.random.default_rng(0)
probes, labels = rng.normal(size=(1000, 32)).astype("f4"), np.arange(1000) // 2
crowd = np.load(sys.argv[1], mmap_mode="r")
identify(probes[:4], labels[:4], distractors=crowd[:9], far=(0.5,))  # libraries are loaded
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = identify(probes, labels, distractors=crowd, far=(1e-3, 1e-6))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert result.impostor_pairs == 1000 * len(crowd)
assert len(result.tar_at_far) == 2
print((peak - before) / 1024)
"""


def test_memory_does_not_grow_with_probes_times_distractors(tmp_path):
    """A matrix of all similarities would take 763 MiB, and the distractors themselves 12."""
    crowd = np.random.default_rng(1).normal(size=(100_000, 32)).astype("f4")
    np.save(tmp_path / "crowd.npy", crowd)
    words = [sys.executable, "-c", MEMORY, str(tmp_path / "crowd.npy")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 256


def test_cmc_and_rates():
    # Two distractors outrank the mate of probe 0, none that of probe 1.
    probes = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    gallery = torch.tensor([[1.0, 1.0], [0.0, 2.0]])
    distractors = torch.tensor([[3.0, 0.1], [2.0, -0.1], [-1.0, -1.0]])
    result = identify(
        probes, ["a", "b"], gallery, ["a", "b"], distractors=distractors, ranks=(1, 3)
    )
    assert result.ranks.tolist() == [3, 1]
    assert result.rates == {1: 0.5, 3: 1.0}
    assert result.cmc(4).tolist() == [0.5, 0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match="depth"):
        result.cmc(0)


BROKEN = torch.ones(6, 4).index_fill(0, torch.tensor(5), torch.nan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"similarity": "manhattan"}, "'manhattan'"),
        *(({"ranks": (rank,)}, f"ranks .* {rank!r}") for rank in (0, 1.5, None, "1")),
        ({"ranks": ()}, "ranks"),
        ({"far": (0.0,)}, "far"),
        ({"gallery": torch.eye(4)}, "without"),
        ({"probe_labels": [0, 1, 2, 3]}, "mate"),
        ({"gallery": torch.eye(4), "gallery_labels": [5, 6, 7, 8]}, "mate"),
        ({"probe_labels": [0, 0, 1]}, "probe_labels has 3 entries"),
        ({"gallery": torch.eye(4), "gallery_labels": [0, 0, 1]}, "gallery_labels has 3 entries"),
        ({"gallery": torch.ones(2, 5), "gallery_labels": [0, 1]}, "dimensions"),
        ({"distractors": torch.ones(2, 3)}, "distractors has 3 dimensions"),
        ({"distractors": [torch.ones(2, 4), torch.ones(4)]}, "block 1"),
        ({"distractors": torch.ones(0, 4)}, "distractors is empty"),
        ({"distractors": []}, "distractors is empty"),
        ({"distractors": [torch.ones(2, 4), BROKEN]}, "block 1 has NaN .* 5"),
        ({"probes": BROKEN, "probe_labels": [0, 0, 1, 1, 2, 2]}, "probes has NaN .* 5"),
    ],
)
def test_identify_rejects_invalid_input(change, message):
    with pytest.raises(ValueError, match=message):
        identify(**{"probes": torch.eye(4), "probe_labels": [0, 0, 1, 1], **change})
