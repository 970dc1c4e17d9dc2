from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from proximetry.data import ClassBalancedSampler, ShuffledSampler, StreamedSampler


@st.composite
def balanced(draw, **fixed):
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=9))
    codes = np.repeat(np.arange(len(sizes)) * 3 + 1, sizes)
    codes = np.random.default_rng(draw(st.integers(0, 99))).permutation(codes)
    options = {
        "codes": codes,
        "classes_per_batch": draw(st.integers(1, len(sizes))),
        "images_per_class": draw(st.integers(1, 5)),
        "seed": draw(st.integers(0, 9)),
    }
    return options | fixed


def several(sampler, epochs=4):
    return [sampler.batch(epoch, n) for epoch in range(epochs) for n in range(len(sampler))]


@given(
    n=st.integers(1, 50),
    batch_size=st.integers(1, 20),
    drop_last=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_shuffled_takes_every_image_once_per_epoch(n, batch_size, drop_last, seed):
    if drop_last and n < batch_size:
        with pytest.raises(ValueError, match="do not fill one batch"):
            ShuffledSampler(n, batch_size, drop_last=drop_last, seed=seed)
        return
    sampler = ShuffledSampler(n, batch_size, drop_last=drop_last, seed=seed)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        drawn = np.concatenate(batches)
        assert len(set(drawn.tolist())) == len(drawn)
        assert len(drawn) == (n - n % batch_size if drop_last else n)
        assert all(len(b) == batch_size for b in batches[:-1])


@given(
    n=st.integers(1, 90),
    batch_size=st.integers(1, 20),
    buffer=st.integers(1, 30),
    run=st.integers(1, 12),
    seed=st.integers(0, 9),
    data=st.data(),
)
def test_streamed_sampler_takes_every_image_once_from_few_runs_at_a_time(
    n, batch_size, buffer, run, seed, data
):
    def make():
        return StreamedSampler(n, batch_size, buffer=buffer, run=run, drop_last=False, seed=seed)

    sampler = make()
    epochs = [[sampler.batch(epoch, k) for k in range(len(sampler))] for epoch in (0, 1)]
    for batches in epochs:
        drawn = np.concatenate(batches)
        assert sorted(drawn.tolist()) == list(range(n))
        for start in range(0, n, buffer):
            # Only the first and the last run of a buffer may extend into other buffers.
            runs = np.unique(drawn[start : start + buffer] // run)
            assert len(runs) <= buffer // run + 3
    epoch, number = data.draw(st.integers(0, 1)), data.draw(st.integers(0, len(sampler) - 1))
    assert (make().batch(epoch, number) == epochs[epoch][number]).all()


def test_streamed_sampler_starts_quickly_with_ten_million_images():
    sampler = StreamedSampler(10_000_000, 256, seed=3)
    first, last = sampler.batch(0, 0), sampler.batch(7, len(sampler) - 1)
    assert len({*first.tolist(), *last.tolist()}) > 500
    assert 50 < len(np.unique(first // 64)) <= 256  # images of many runs are mixed
    assert (sampler.batch(0, 0) == first).all()
    assert (sampler.batch(1, 0) != first).any()
    with pytest.raises(ValueError, match="buffer and run must be positive, got 0 and 64"):
        StreamedSampler(10, 2, buffer=0)


@given(options=balanced())
def test_balanced_batches_have_distinct_classes_and_m_images(options):
    sampler = ClassBalancedSampler(**options)
    codes, m = options["codes"], options["images_per_class"]
    sizes = Counter(codes.tolist())
    for batch in several(sampler):
        classes = codes[batch].reshape(-1, m)
        assert (classes == classes[:, :1]).all()
        assert len(set(classes[:, 0].tolist())) == options["classes_per_batch"]
        for images, label in zip(batch.reshape(-1, m), classes[:, 0].tolist(), strict=True):
            counts, size = Counter(images.tolist()), sizes[label]
            assert max(counts.values()) <= (1 if m <= size else m // size + 2)


@given(options=balanced())
def test_every_class_and_image_is_used_before_any_repeats(options):
    sampler = ClassBalancedSampler(**options)
    codes = options["codes"]
    drawn = np.concatenate(several(sampler, 6))
    starts = drawn[:: options["images_per_class"]]
    visits = codes[starts]
    classes = len(set(codes.tolist()))
    for start in range(0, len(visits) - classes + 1, classes):
        assert len(set(visits[start : start + classes].tolist())) == classes
    for label in set(codes.tolist()):
        members = np.flatnonzero(codes == label)
        mine = drawn[codes[drawn] == label]
        for start in range(0, len(mine) - len(members) + 1, len(members)):
            assert sorted(mine[start : start + len(members)].tolist()) == members.tolist()


@settings(max_examples=40)
@given(options=balanced(), data=st.data(), kind=st.sampled_from(["balanced", "shuffled"]))
def test_batches_are_computed_in_any_order(options, data, kind):
    def make():
        if kind == "balanced":
            return ClassBalancedSampler(**options)
        return ShuffledSampler(len(options["codes"]), 3, drop_last=False, seed=options["seed"])

    expected = [batch.tolist() for batch in several(make(), 6)]
    sampler = make()
    places = st.tuples(st.integers(0, 5), st.integers(0, len(sampler) - 1))
    for epoch, number in data.draw(st.lists(places, max_size=8)):
        found = sampler.batch(epoch, number)
        assert found.tolist() == expected[epoch * len(sampler) + number]


def test_batches_of_a_seed_do_not_change():
    # Fixed, so that later versions reproduce results.
    sampler = ClassBalancedSampler(np.arange(23) % 5, 3, 2, seed=7)
    assert [sampler.batch(e, n).tolist() for e, n in [(0, 0), (2, 1), (11, 2)]] == [
        [3, 13, 0, 10, 17, 7],
        [7, 17, 6, 11, 8, 18],
        [7, 17, 8, 3, 6, 16],
    ]
    assert ShuffledSampler(17, 5, seed=3).batch(4, 2).tolist() == [15, 4, 0, 1, 16]
    orders = {
        tuple(ShuffledSampler(40, 40, seed=s).batch(e, 0).tolist()) for s in (1, 2) for e in (0, 1)
    }
    assert len(orders) == 4


@pytest.mark.parametrize(
    "sampler", [ClassBalancedSampler(np.arange(30) % 5, 3, 2), ShuffledSampler(30, 7)]
)
def test_works_as_a_batch_sampler_of_a_loader(sampler):
    loader = DataLoader(list(range(30)), batch_sampler=sampler)
    assert len(loader) == len(sampler)
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        expected = [sampler.batch(epoch, n).tolist() for n in range(len(sampler))]
        assert [b.tolist() for b in loader] == expected
        assert [b.tolist() for b in loader] == expected  # until set_epoch


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ShuffledSampler(0, 1), "must be positive, got 0 and 1"),
        (lambda: ShuffledSampler(5, 0), "must be positive"),
        (lambda: ShuffledSampler(5, 6), "5 images do not fill one batch of 6"),
        (lambda: ShuffledSampler(9, 2, seed=-1), "seed must not be negative"),
        (lambda: ClassBalancedSampler([0, 1], 3, 1), "3, but there are 2 classes"),
        (lambda: ClassBalancedSampler([0, 1], 0, 1), "must be positive, got 0 and 1"),
        (lambda: ClassBalancedSampler([0, 1], 2, 0), "must be positive, got 2 and 0"),
        (lambda: ClassBalancedSampler([], 1, 1), "integers"),
        (lambda: ClassBalancedSampler([0.5, 1], 1, 1), "integers, got float64"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def dealt(items, count, seed, turns):
    """The first turns of a cyclic shuffle, each shuffle reordered to avoid duplicates in a turn."""
    taken = []
    for number in range(-(-turns * count // len(items))):
        order = np.random.default_rng([*seed, number]).permutation(items).tolist()
        begun = len(taken) % count
        if begun and count <= len(items):
            first = [item for item in order if item not in taken[-begun:]][: count - begun]
            order = first + [item for item in order if item not in first]
        taken += order
    return [taken[turn * count : (turn + 1) * count] for turn in range(turns)]


@given(options=balanced())
def test_batches_equal_explicit_shuffles(options):
    sampler = ClassBalancedSampler(**options)
    codes, c, m, seed = options.values()
    labels = sorted(set(codes.tolist()))
    batches = 3 * len(sampler)
    rounds = dealt(np.arange(len(labels)), c, (seed, 1), batches)
    turns = -(-batches * c // len(labels))
    shuffles = [
        dealt(np.flatnonzero(codes == label), m, (seed, 2, place), turns)
        for place, label in enumerate(labels)
    ]
    met = Counter()
    for batch, classes in zip(several(sampler, 3), rounds, strict=True):
        wanted = [item for place in classes for item in shuffles[place][met[place]]]
        met.update(classes)
        assert batch.tolist() == wanted


def test_evicted_class_shuffles_are_reproduced(monkeypatch):
    codes = np.arange(400) % 40
    expected = np.stack(several(ClassBalancedSampler(codes, 8, 3), 9))
    monkeypatch.setattr("proximetry.data.samplers._MAX_CACHED_CLASSES", 5)
    assert (np.stack(several(ClassBalancedSampler(codes, 8, 3), 9)) == expected).all()
