from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry._util.tensors import inner_products
from proximetry.metrics import Metrics, evaluate, retrieve
from proximetry.metrics._search import neighbors, symmetric
from proximetry.metrics._search.neighbors import nearest, search_blocks
from proximetry.metrics._search.problem import SearchProblem
from proximetry.metrics._search.similarities import from_keys, to_keys
from proximetry.metrics._search.symmetric import can_search_symmetric, search_symmetric

from . import brute

T = TypeVar("T")

floats = st.floats(-(2.0**100), 2.0**100, width=32)


@given(st.lists(floats, min_size=1, max_size=40), st.integers(0, 2**31 - 50))
def test_keys_are_ordered_by_similarity_then_index(values, first):
    similarities = torch.tensor(values, dtype=torch.float32)
    ids = torch.arange(first, first + len(values))
    keys = to_keys(similarities, ids)
    expected = sorted(range(len(values)), key=lambda i: (-float(similarities[i]), i))
    assert keys.argsort(descending=True).tolist() == expected
    back, back_ids = from_keys(keys)
    assert torch.equal(back, similarities)
    assert torch.equal(back_ids, ids)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    width=st.integers(1, 40),
    depth=st.integers(1, 50),
    levels=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_nearest_breaks_ties_by_index(rows, width, depth, levels, seed, dtype):
    generator = np.random.default_rng(seed)
    similarities = generator.integers(-levels, levels, (rows, width)).astype(np.float64)
    values, ids = nearest(torch.tensor(similarities, dtype=dtype), min(depth, width))
    for row, remaining, near in zip(similarities, ids.tolist(), values.tolist(), strict=True):
        order = brute.ranking(row, np.ones(width, dtype=bool))[:depth]
        assert remaining == order
        assert near == [row[j] for j in order]


@pytest.mark.parametrize(
    ("rows", "columns", "dim"), [(0, 3, 4), (1, 1, 1), (7, 130, 33), (65, 3, 512)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_inner_products_equal_matmul(rows, columns, dim, dtype):
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(rows, dim, generator=generator, dtype=dtype)
    right = torch.randn(dim, columns, generator=generator, dtype=dtype).T
    actual = inner_products(left, right)
    assert actual.dtype == dtype
    assert actual.is_contiguous()
    torch.testing.assert_close(actual.double(), left.double() @ right.double().T, rtol=0, atol=1e-4)


def test_inner_products_have_gradients():
    left = torch.randn(3, 4, requires_grad=True)
    inner_products(left, torch.ones(2, 4)).sum().backward()
    assert torch.equal(left.grad, torch.full((3, 4), 2.0))


def self_task(vectors, codes, similarity):
    everyone, classes = torch.arange(len(vectors)), codes.unique().numpy()
    return SearchProblem(vectors, vectors, codes, codes, classes, similarity, self_index=everyone)


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles so small that a few hundred items fill many."""
    monkeypatch.setattr(symmetric, "TILE", 64)
    monkeypatch.setattr(symmetric, "GROUP", 8)
    monkeypatch.setitem(neighbors.BLOCK_BYTES, "cpu", 20_000)


def compare_methods(problem, depth):
    assert can_search_symmetric(problem, depth)
    count = len(problem.gallery)
    one = search_symmetric(problem, torch.full((count,), depth), with_ranks=True)
    ids = torch.empty((count, depth), dtype=torch.int64)
    near = torch.empty((count, depth))
    ranks = torch.empty(count, dtype=torch.int64)
    for block in search_blocks(problem, torch.full((count,), depth), with_ranks=True):
        ids[block.rows], near[block.rows] = block.ids, block.similarities
        assert block.ranks is not None
        ranks[block.rows] = block.ranks
    assert torch.equal(one.rows, torch.arange(count))
    assert torch.equal(one.ids, ids)
    assert torch.equal(one.similarities, near)
    assert one.ranks is not None
    assert torch.equal(one.ranks, ranks)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("similarity", ["dot", "euclidean"])
@pytest.mark.parametrize("levels", [1, 2, 40])
@pytest.mark.parametrize(("count", "classes"), [(128, 5), (130, 128), (357, 30), (511, 200)])
def test_symmetric_search_equals_blocks_with_ties(similarity, levels, count, classes):
    # With whole numbers, similarities are exact and ties frequent, although there are few copies.
    generator = torch.Generator().manual_seed(count + levels)
    vectors = torch.randint(-levels, levels + 1, (count, 12), generator=generator).float()
    codes = torch.randint(0, classes, (count,), generator=generator)
    codes = torch.unique(codes, return_inverse=True)[1]
    if int(torch.bincount(codes).max()) > 32:
        codes = torch.arange(count) % 30
    for depth in (1, 7, 16):
        compare_methods(self_task(vectors, codes, similarity), depth)


@pytest.mark.usefixtures("small_tiles")
def test_symmetric_search_ends_each_list_at_its_depth():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randint(-2, 3, (357, 12), generator=generator).float()
    problem = self_task(vectors, torch.arange(357) % 30, "dot")
    depths = torch.randint(1, 17, (357,), generator=generator)
    full = search_symmetric(problem, torch.full((357,), 16), with_ranks=True)
    actual = search_symmetric(problem, depths, with_ranks=True)
    beyond = torch.arange(int(depths.max())) >= depths[:, None]
    assert torch.equal(actual.ids, full.ids.masked_fill(beyond, -1))
    assert torch.equal(actual.similarities, full.similarities.masked_fill(beyond, -torch.inf))
    assert actual.ranks is not None
    assert full.ranks is not None
    assert torch.equal(actual.ranks, full.ranks)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("threads", [2, 5])
def test_symmetric_search_on_several_threads(threads):
    """Tiles are visited concurrently, in no fixed order; the result is always the same."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            vectors = torch.randint(-2, 3, (700, 8), generator=generator).float()
            compare_methods(self_task(vectors, torch.arange(700) % 150, "dot"), 9)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("small_tiles")
def test_symmetric_search_multiplies_without_gradients(monkeypatch):
    """With gradients enabled, `inner_products` cannot use oneDNN."""

    modes = []

    def multiply(left, right):
        modes.append(torch.is_grad_enabled())
        return inner_products(left, right)

    monkeypatch.setattr(symmetric, "inner_products", multiply)
    vectors = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    problem = self_task(vectors, torch.arange(300) % 40, "cosine")
    search_symmetric(problem, torch.full((300,), 9), with_ranks=True)
    assert set(modes) == {False}


def new_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.usefixtures("small_tiles")
def test_evaluate_in_threads_restores_torch_settings():
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    new_thread(lambda: torch.set_num_threads(2))  # for new threads; this one keeps its number
    torch.set_float32_matmul_precision("medium")
    together = Barrier(4)

    def search(seed):
        generator = torch.Generator().manual_seed(seed)
        vectors, labels = torch.randn(300, 8, generator=generator), torch.arange(300) % 40
        together.wait()
        return [evaluate(vectors, labels) for _ in range(4)]

    try:
        with ThreadPoolExecutor(4) as pool:
            several = list(pool.map(search, range(4)))
        together = Barrier(1)
        assert several == [search(seed) for seed in range(4)]
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.get_num_threads() == before[0]
        assert new_thread(torch.get_num_threads) == 2
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


@pytest.mark.usefixtures("small_tiles")
def test_inference_mode_default_dtype_and_device_of_the_caller_do_not_matter():
    vectors = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    labels = np.arange(200) % 40
    options: Any = [{"metrics": Metrics(clustering=True)}, {"rerank": True}, {"expand": 2}]
    expected = [evaluate(vectors, labels, **one) for one in options]
    with torch.inference_mode():
        assert [evaluate(vectors * 1, labels, **one) for one in options] == expected
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            assert [evaluate(vectors, labels, **one) for one in options] == expected
    finally:
        torch.set_default_dtype(torch.float32)


def test_symmetric_search_with_default_tiles():
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 900, (4500,), generator=generator)
    codes = torch.unique(codes, return_inverse=True)[1]
    centers = torch.randn(900, 16, generator=generator)
    vectors = centers[codes] + torch.randn(4500, 16, generator=generator)
    vectors[2000:2100] = vectors[:100]  # duplicates, some of them across classes
    compare_methods(self_task(vectors, codes, "cosine"), 50)


def precision_settings():
    return torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def reset_precision():
    torch.set_float32_matmul_precision("highest")
    for part in precision_settings():
        part.fp32_precision = "none"


@pytest.fixture
def restored_precision():
    yield
    reset_precision()


@pytest.mark.usefixtures("restored_precision")
@pytest.mark.parametrize("setting", ["untouched", "medium", "cuda", "all"])
def test_precision_settings_of_the_caller_do_not_matter(setting):
    vectors = torch.randn(300, 64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(300) % 30
    plain = retrieve(vectors, labels, k=20)
    reset_precision()
    if setting == "cuda":
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    elif setting == "all":
        torch.backends.fp32_precision = "tf32"
    elif setting != "untouched":
        torch.set_float32_matmul_precision(setting)
    before = [part.fp32_precision for part in precision_settings()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = retrieve(vectors, labels, k=20)
    assert [part.fp32_precision for part in precision_settings()] == before
    if setting == "medium":
        assert torch.get_float32_matmul_precision() == setting
    if setting == "all":
        torch.backends.fp32_precision = "ieee"  # still applies to all backends
        assert {part.fp32_precision for part in precision_settings()} == {"ieee"}
    assert np.array_equal(plain.ids, actual.ids)
    assert np.array_equal(plain.similarities, actual.similarities)
