"""The streamed engine equals the dense engine for any shape and tile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry.losses import streamed as streamed_module
from proximetry.losses.base import DENSE_ENTRIES
from tests.losses.cases import ANGULAR, NAMES, batch, make, value_and_gradients


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20)  # for each loss, and all of them share the engines
@given(
    size=st.integers(1, 24),
    classes=st.integers(1, 40),
    dim=st.integers(1, 24),
    k=st.integers(1, 4),
    entries=st.sampled_from([1, 16, 64, 256, 2**18]),
    seed=st.integers(0, 10**6),
)
def test_streamed_equals_dense_in_float32(name, size, classes, dim, k, entries, seed):
    x, y = batch(size, classes, dim, seed, torch.float32)
    first = make(name, classes, dim, k, seed, engine="dense").eval()
    second = make(name, classes, dim, k, seed, engine="streamed").eval()
    expected = value_and_gradients(first, x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(streamed_module.TILE_ENTRIES, "cpu", entries)
        got = value_and_gradients(second, x, y)
    assert got[0].item() == pytest.approx(expected[0].item(), rel=1e-5, abs=1e-6)
    # The gradient of a cosine is (slope / length) minus its radial part, which is the scale of its
    # rounding errors. The slope of a margin in angle has a pole
    # at cosines of ±1.
    slope = float(max(getattr(first, key, 0.0) for key in ("alpha", "scale")) or 2.0)
    if name in ANGULAR:
        own = first.similarities(x).gather(1, y.unsqueeze(1))
        slope /= (1 - own.square()).clamp(min=1e-6).min().item()
    lengths = (x.norm(dim=1), first.proxies.weight.detach().norm(dim=2))
    for ours, theirs, length in zip(got[1:], expected[1:], lengths, strict=True):
        scale = max(theirs.abs().max().item(), slope / length.min().item() / 10)
        assert (ours - theirs).abs().max() <= 1e-5 * scale


@pytest.mark.parametrize(
    ("name", "classes", "k", "engine", "expected"),
    [
        ("proxy_anchor", DENSE_ENTRIES // 64, 1, "auto", "dense"),
        ("proxy_anchor", DENSE_ENTRIES // 64 + 1, 1, "auto", "streamed"),
        ("mpa", DENSE_ENTRIES // 64, 2, "auto", "streamed"),
        ("mpa", 10**5, 1, "dense", "dense"),
    ],
)
def test_auto_engine_streams_large_problems(name, classes, k, engine, expected):
    loss = make(name, classes=classes, dim=1, k=k, engine=engine)
    assert loss.choose_engine(64) == expected


@pytest.mark.parametrize("name", ["proxy_anchor", "mpa", "soft_triple", "proxy_nca_plus_plus"])
def test_streaming_never_allocates_batch_by_classes(name):
    """Every tensor that streaming makes is far smaller than batch × classes × K."""
    size, classes, dim, k = 64, 4096, 8, 2
    loss = make(name, classes, dim, k, engine="streamed")
    x, y = batch(size, classes, dim, dtype=torch.float32)
    largest = _largest_tensor(lambda: value_and_gradients(loss, x, y))
    per_class = loss.proxies.proxies_per_class
    assert largest <= max(streamed_module.TILE_ENTRIES["cpu"], classes * per_class * dim)
    dense_loss = make(name, classes, dim, k, engine="dense")
    assert _largest_tensor(lambda: value_and_gradients(dense_loss, x, y)) >= size * classes


def _largest_tensor(run):
    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.largest = max(self.largest, leaf.numel())
            return result

    with Watch() as watch:
        run()
    return watch.largest


@pytest.mark.parametrize("name", NAMES)
def test_backward_with_a_factor_and_twice_through_one_graph(name):
    x, y = batch()
    x.requires_grad_()
    loss = make(name, k=2, engine="streamed").double().eval()
    value = loss(x, y)
    inputs = (x, loss.proxies.weight)
    first = torch.autograd.grad(2.5 * value, inputs, retain_graph=True)
    second = torch.autograd.grad(value, inputs)
    torch.testing.assert_close(first, tuple(2.5 * b for b in second), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_frozen_proxies_and_frozen_embeddings(name):
    x, y = batch()
    loss = make(name, k=2, engine="streamed").double().eval()
    both = value_and_gradients(loss, x, y)
    (only_proxies,) = torch.autograd.grad(loss(x, y), loss.proxies.weight)
    torch.testing.assert_close(only_proxies, both[2])
    loss.proxies.weight.requires_grad_(False)
    x = x.clone().requires_grad_()
    (only_x,) = torch.autograd.grad(loss(x, y), x)
    torch.testing.assert_close(only_x, both[1])
    with torch.no_grad():
        assert loss(x, y).item() == pytest.approx(both[0].item())


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_double_backward_agrees_between_engines(name, reduction):
    x, y = batch()
    x.requires_grad_()
    penalties = []
    for engine in ("dense", "streamed"):
        loss = make(name, k=2, engine=engine).double().eval()
        inputs = (x, loss.proxies.weight)
        value = loss(x, y, reduction=reduction).square().sum()
        first = torch.autograd.grad(value, inputs, create_graph=True)
        norm = sum(gradient.square().sum() for gradient in first)
        penalties.append(torch.autograd.grad(norm, inputs))
    torch.testing.assert_close(*penalties, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple"])
def test_proxies_changed_before_backward_raise(name):
    x, y = batch()
    loss = make(name, k=2, engine="streamed").double()
    value = loss(x.requires_grad_(), y)
    with torch.no_grad():
        loss.proxies.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
