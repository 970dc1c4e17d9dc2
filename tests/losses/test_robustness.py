"""Extreme values, NaN, precision, devices, compilation and invalid batches."""

from array import array
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from proximetry import losses
from proximetry.losses.pairs import PAIR_LOSSES, PairLoss
from proximetry.losses.streamed import TILE_ENTRIES
from tests.losses.cases import NAMES, batch, make, value_and_gradients

ENGINES = ["dense", "streamed"]


def finite_value_and_gradients(loss, x, y):
    found = value_and_gradients(loss, x, y)
    assert all(torch.isfinite(one).all() for one in found)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", NAMES)
def test_odd_batches_in_every_precision(name, dtype, engine):
    x, y = batch(dtype=torch.float32)
    x = x.to(dtype)
    zero_row = x.clone()
    zero_row[3] = 0
    for rows, labels, classes in (
        (x, y, 7),
        (x, y, 1000),
        (x, torch.zeros_like(y), 7),
        (x, torch.zeros_like(y), 1),
        (x[:1], y[:1], 7),
        (x[:1].expand(9, -1).contiguous(), y, 7),
        (torch.zeros_like(x), y, 7),
        (zero_row, y, 7),
        (x * 1e-3, y, 7),
    ):
        loss = make(name, classes, k=3, engine=engine)
        value, gradient, _ = finite_value_and_gradients(loss, rows, labels)
        assert (value.dtype, value.ndim, gradient.dtype) == (torch.float32, 0, dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_extreme_settings(name, engine):
    x, y = batch(dtype=torch.float32)
    loss = make(name, k=3, engine=engine)
    own = loss.proxies.weight.detach()[y, 0]
    for scale in (1e-3, 1.0, 1000.0):
        for key in {"alpha", "scale", "temperature"} & set(loss.settings()):
            setattr(loss, key, 1.0 / scale if key == "temperature" else scale)
        for rows in (x, own, -own):  # cosines of exactly ±1
            finite_value_and_gradients(loss, rows, y)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("alpha", [1.0, 50.0, 59.0, 61.0, 300.0, 1000.0])
@pytest.mark.parametrize("name", ["proxy_anchor", "mpa", "mpa_dw", "mpa_ap"])
def test_large_alpha_is_accurate_in_float32(name, alpha, engine):
    x, y = batch()
    wide = make(name, k=3, alpha=alpha, engine="dense").double()
    narrow = make(name, k=3, alpha=alpha, engine=engine)
    expected = value_and_gradients(wide, x, y)
    got = value_and_gradients(narrow, x.float(), y)
    assert got[0].item() == pytest.approx(expected[0].item(), rel=1e-5)
    for a, b in zip(got[1:], expected[1:], strict=True):
        assert (a.double() - b).abs().max() <= 2e-6 * (1 + alpha) * b.abs().max()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_zero_proxies_are_finite_and_nan_proxies_make_the_loss_nan(name, engine):
    x, y = batch(dtype=torch.float32)
    loss = make(name, k=3, engine=engine)
    with torch.no_grad():
        loss.proxies.weight[2] = 0
    assert (finite_value_and_gradients(loss, x, y)[2][2] == 0).all()
    for row in range(7):
        for factor in (1e25, torch.nan):
            loss = make(name, k=3, engine=engine)
            with torch.no_grad():
                loss.proxies.weight[row] *= factor
            assert loss(x, y).isnan()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-13, 1e25, 1e30])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_long_and_short_embeddings_keep_their_direction(name, engine, scale):
    """Beyond 1.8e19 the square of a float32 is infinite, below 1e-23 it is zero."""
    x, y = batch(dtype=torch.float32)
    wide = make(name, k=3, engine=engine).double()
    expected = value_and_gradients(wide, x.double() * scale, y)
    got = value_and_gradients(make(name, k=3, engine=engine), x * scale, y)
    for a, b in zip(got, expected, strict=True):
        assert (a.double() - b.double()).abs().max() <= 1e-4 * b.abs().max()


REMEMBERING = {
    "center": lambda: losses.CenterLoss(7, 5),
    **{
        f"{name} with memory": partial(PairLoss, name, memory=32, dim=5)
        for name in PAIR_LOSSES
        if name != "n_pair"
    },
}
EVERY_LOSS = {
    **{
        f"{name} {engine}": partial(make, name, k=2, engine=engine)
        for name in NAMES
        for engine in ENGINES
    },
    **{f"pairs/{name}": partial(PairLoss, name) for name in PAIR_LOSSES},
    **REMEMBERING,
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_nan_in_embeddings_makes_the_loss_nan(name, bad):
    make_it = EVERY_LOSS[name]
    x, y = batch(dtype=torch.float32)
    for row, column in ((0, 0), (4, 2), (8, 4)):
        broken = x.clone()
        broken[row, column] = bad
        assert not torch.isfinite(make_it()(broken, y))
        assert not torch.isfinite(make_it()(torch.full_like(x, bad), y))
        only = broken[row : row + 1]
        assert not torch.isfinite(make_it()(only, y[row : row + 1])), "without any pair too"


@pytest.mark.parametrize("factor", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("name", REMEMBERING)
def test_nan_batch_does_not_change_centers_or_memory(name, factor):
    x, y = batch(dtype=torch.float32)
    loss = REMEMBERING[name]()
    loss(x, y)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    if torch.isfinite(loss(x * factor, y)):  # directions of any length can be remembered
        assert isinstance(loss, PairLoss)
        assert torch.isfinite(loss.loss.embedding_memory).all()
        return
    for key, value in loss.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert torch.isfinite(loss(x, y))


@pytest.mark.parametrize("name", NAMES)
def test_step_without_check_labels_does_not_synchronize_with_the_device(name):
    """No tensor is read on the CPU; labels of −1 are still ignored."""

    def fail(*_):
        raise AssertionError("this would synchronize with the GPU")

    x, y = batch(dtype=torch.float32)
    y[3] = -1
    expected = make(name, k=2, engine="dense")(x[y >= 0], y[y >= 0])
    loss = make(name, k=2, engine="dense")
    loss.check_labels = False  # as in the training loop
    with pytest.MonkeyPatch.context() as patch:
        for reading in ("item", "tolist", "__bool__", "__int__", "__float__", "nonzero"):
            patch.setattr(torch.Tensor, reading, fail)
        value = loss(x.requires_grad_(), y)
        value.backward()
    torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing(name, engine):
    x, y = batch(dtype=torch.float32)
    loss = make(name, k=2, engine=engine).eval()
    expected = value_and_gradients(loss, x, y)
    inside = x.clone().requires_grad_()
    loss.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = loss(inside, y)
    value.backward()
    for got, one in zip((value, inside.grad, loss.proxies.weight.grad), expected, strict=True):
        assert got.dtype == torch.float32
        assert torch.equal(got, one)


@pytest.mark.parametrize(
    "make_it",
    [
        *(partial(make, name, k=2) for name in NAMES),
        lambda: losses.ProxyNCAPlusPlus(7, 5, learn_temperature=True),
        lambda: PairLoss("margin", num_classes=7, memory=32, dim=5),
        lambda: losses.CenterLoss(7, 5),
        lambda: nn.Sequential(losses.CenterLoss(7, 5)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_and_buffers_stay_in_full_precision(make_it, dtype):
    loss = make_it()
    for tensor in loss.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(-3, -1)
    before = {key: value.clone() for key, value in loss.state_dict().items()}
    for key, value in loss.to(dtype).state_dict().items():
        assert torch.equal(value, before[key])
    widened = loss.double().state_dict().values()
    assert {value.dtype for value in widened} <= {torch.float64, torch.int64, torch.uint8}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, "aot_eager") for name in NAMES),
        pytest.param("mpa", "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiles_as_one_graph(name, backend):
    x, y = batch(dtype=torch.float32)
    y[3] = -1
    loss = make(name, k=2, engine="dense").eval()
    expected = value_and_gradients(loss, x, y)
    torch.compiler.reset()  # the losses share one forward, which has at most eight variants
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    got = value_and_gradients(compiled, x, y)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1:], expected[1:], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_loss_moves_between_devices(name):
    loss = make(name).to("meta")
    assert all(tensor.device.type == "meta" for tensor in loss.state_dict().values())
    empty = loss.to_empty(device="cpu")
    empty.load_state_dict(make(name).state_dict())
    x, y = batch(dtype=torch.float32)
    assert empty(x, y).item() == pytest.approx(make(name)(x, y).item(), rel=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_gpu_gives_the_values_of_the_cpu(name, engine):
    x, y = batch(64, 500, 32, dtype=torch.float32)
    loss = make(name, 500, 32, k=3, engine=engine).eval()
    expected = value_and_gradients(loss, x, y)
    got = value_and_gradients(loss.cuda(), x.cuda(), y.cuda())
    for a, b in zip(got, expected, strict=True):
        assert (a.cpu() - b.cpu()).abs().max() <= 1e-4 * b.abs().max().cpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["proxy_anchor", "mpa", "soft_triple", "arcface"])
def test_streamed_losses_do_not_synchronize_without_label_checks(name, monkeypatch):
    monkeypatch.setitem(TILE_ENTRIES, "cuda", 2**12)  # several tiles
    x, y = (tensor.cuda() for tensor in batch(64, 500, 32, dtype=torch.float32))
    loss = make(name, 500, 32, k=3, engine="streamed").cuda()
    loss.check_labels = False
    x.requires_grad_()
    loss(x, y).backward()  # the first step initializes CUDA libraries
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(x, y).backward()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize(
    "make_it",
    [
        lambda: make("proxy_anchor"),
        lambda: make("sphereface").eval(),
        lambda: PairLoss("contrastive"),
        lambda: losses.CenterLoss(7, 5),
    ],
)
def test_labels_may_be_integers_of_any_type(make_it):
    x, y = batch(dtype=torch.float32)
    expected = make_it()(x, y).item()
    assert expected != 0
    tensors = (y.to(dtype) for dtype in (torch.int32, torch.int16, torch.int8, torch.uint8))
    n = y.numpy()
    arrays = n, n.astype("uint16"), n.astype(">i4"), n.astype(object), array("q", n)
    for labels in (*tensors, *arrays, y.tolist(), tuple(n), list(n), list(y)):
        assert make_it()(x, labels).item() == expected


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda x, y: (x, y.float()), "torch.float32"),
        (lambda x, y: (x, y.bool()), "torch.bool"),
        (lambda x, y: (x, y + 5), r"label 11 \(position 0 .* 0\.\.6\. .*larger num_classes"),
        (lambda x, y: (x, y - 10), "label -10 .* -1 to ignore"),
        (lambda x, y: (x[:, :4], y), "4 dimensions"),
        (lambda x, y: (x, y[:5]), r"\[9\], .* \[5\]"),
        (lambda x, y: (x, y.unsqueeze(1)), r"\[9, 1\]"),
        (lambda x, y: (x[:0], y[:0]), "empty"),
        (lambda x, y: (x[0], y[:1]), r"\[5\]"),
        (lambda x, y: (x.long(), y), "torch.int64"),
        (lambda x, y: (x.numpy(), y), "got ndarray"),
        (lambda x, y: (x, y.numpy() * 1.0), "labels .* float64"),
        (lambda x, y: (x, list("abcdefghi")), "labels .* strings"),
        (lambda x, y: (x, None), "labels .* None"),
        (lambda x, y: (x, [[1], [2, 3]]), "labels"),
        (lambda x, y: (x, np.array([1, None] + [2] * 7)), "labels .* object"),
        (lambda x, y: (x, y.tolist()[:5]), "labels has 5 entries for 9"),
        (lambda x, y: (x, [*y.tolist()[:8], 7]), r"label 7 \(position 8"),
    ],
)
def test_loss_rejects_invalid_batches(break_it, message):
    x, y = batch(dtype=torch.float32)
    y[0], y[1] = 6, 0
    with pytest.raises(ValueError, match=message):
        make("proxy_anchor")(*break_it(x, y))
