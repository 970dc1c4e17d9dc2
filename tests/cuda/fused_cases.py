"""The fused loss engine; run by test_kernels.py in Triton's interpreter or on a GPU."""

import math
import os

import numpy as np
import pytest
import torch

from proximetry import losses
from proximetry.losses import adjustments, base, fused_batch
from proximetry.losses import batch as torch_batch
from proximetry.losses import fused as fused_module
from tests.losses.cases import MULTI, NAMES, OPTIMIZERS

DEVICE = os.environ["KERNEL_DEVICE"]
ON_GPU = DEVICE == "cuda"
# The interpreter computes in NumPy, which warns where a GPU returns infinity.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
#: batch, classes, dimensions, proxies per class
SHAPES = [(13, 70, 40, 3), (1, 1, 8, 1), (35, 9, 5, 10)]
GPU_SHAPES = [
    (1, 1, 8, 1),
    (4096, 1001, 96, 2),
    (257, 100_003, 128, 1),
    (64, 20_011, 200, 10),
    (180, 11_318, 512, 2),
]


def random_shapes(count, largest=2**27):
    """Draw shapes whose array of cosines has at most ``largest`` entries."""
    draw = np.random.default_rng(33)
    while count:
        size, classes = (int(n) for n in np.exp(draw.uniform(0, np.log([4096, 100_003]))))
        k = int(draw.choice([1, 2, 10]))
        if size * classes * k <= largest:
            count -= 1
            yield size, classes, int(draw.integers(1, 400)), k


SMOOTH = [name for name in NAMES if "label_smoothing" in losses.loss_settings(name)]


def make(name, classes, dim, k, engine, **settings):
    torch.manual_seed(0)
    if k > 1 and name in MULTI:
        settings["proxies_per_class"] = k
    return losses.create(name, classes, dim, engine=engine, **settings).to(DEVICE).eval()


def batch(size, classes, dim, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator)
    return x.to(DEVICE), torch.randint(0, classes, (size,), generator=generator).to(DEVICE)


def value_and_gradients(loss, x, y, *args, **kwargs):
    x = x.detach().to(loss.proxies.weight.dtype).requires_grad_()
    loss.zero_grad(set_to_none=True)
    value = loss(x, y, *args, **kwargs)
    value.sum().backward()
    return value.detach(), x.grad, *(p.grad for p in loss.parameters())


def errors(name, shape, *args, precision="float32", settings=None, reduction="mean", draw=None):
    """The relative errors of value and gradients against the dense engine in float64."""
    size, classes, dim, k = shape
    x, y = batch(size, classes, dim)
    settings = settings or {}
    loss = make(name, classes, dim, k, "fused", precision=precision, **settings)
    reference = make(name, classes, dim, k, "dense", **settings).double()
    if draw is not None:
        x = draw(x)
        for one in (loss, reference):
            one.proxies.weight.data = draw(one.proxies.weight.data)
    got = value_and_gradients(loss, x, y, *args, reduction=reduction)
    expected = value_and_gradients(reference, x, y, *args, reduction=reduction)
    # Learned numbers have gradients that nearly cancel out.
    floors = [1e-6] * 3 + [0.1] * len(got[3:])
    return [distance(*pair) for pair in zip(got, expected, floors, strict=True)]


def exact_in_bf16(x):
    """Keep the signs of 4ⁿ dimensions, so that bf16 represents unit vectors exactly."""
    count = 4 ** int(math.log(x.shape[-1], 4) + 1e-9)
    kept = torch.zeros_like(x).scatter_(-1, x.abs().topk(count).indices, 1.0)
    return torch.where(x < 0, -kept, kept)


def distance(got, expected, floor=1e-6):
    return ((got.double() - expected).norm() / expected.norm().clamp(min=floor)).item()


@pytest.mark.parametrize("shape", GPU_SHAPES if ON_GPU else SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_fused_equals_dense_in_float64(name, shape):
    assert max(errors(name, shape)) <= 1e-5


@needs_gpu
@pytest.mark.parametrize(
    ("name", "shape"),
    list(zip(4 * NAMES, random_shapes(4 * len(NAMES)), strict=True)),
    ids=str,
)
def test_random_shapes(name, shape):
    assert max(errors(name, shape)) <= 1e-5


@pytest.mark.parametrize(
    ("name", "shape"),
    list(zip(4 * NAMES, random_shapes(4 * len(NAMES)), strict=True))
    if ON_GPU
    else [(name, (9, 5, 20, 2)) for name in NAMES],
    ids=str,
)
def test_bf16_random_shapes(name, shape):
    """Rounding moves slopes by up to 0.004; that of other vectors: see the next test."""
    value, *gradients = errors(name, shape, precision="bf16", draw=exact_in_bf16)
    assert value <= 1e-5
    assert max(gradients) <= 6e-3


@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple"])
@pytest.mark.parametrize(("precision", "unit"), [("tf32", 4e-5), ("bf16", 6e-3)])
def test_precision_bounds_the_error(name, precision, unit):
    """Rounding of unit vectors changes a cosine by about unit / √D, and the logits scale times."""
    scale, dim = {"proxy_anchor": 32.0, "soft_triple": 20.0}[name], 96
    found = errors(name, (33, 70, dim, 2), precision=precision)
    bound = unit * scale / math.sqrt(dim)
    assert bound / 1000 < max(found) <= bound


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mpa", "mpa_ap", "proxy_nca_plus_plus"])
def test_weights_ignored_labels_and_smoothing(name, reduction):
    size, classes, dim, k = 11, 19, 24, 2
    settings = {"label_smoothing": 0.2} if name in SMOOTH else {}
    if name == "mpa":
        settings["negative_classes"] = "absent"
    x, y = batch(size, classes, dim)
    y[3] = base.IGNORED
    x[3] = torch.nan
    weights = torch.linspace(0.0, 3.0, size, device=DEVICE)
    loss = make(name, classes, dim, k, "fused", **settings)
    reference = make(name, classes, dim, k, "dense", **settings).double()
    got = value_and_gradients(loss, x, y, weights, reduction=reduction)
    expected = value_and_gradients(reference, x, y, weights, reduction=reduction)
    for ours, theirs in zip(got, expected, strict=True):
        assert not ours.isnan().any()
        assert distance(ours, theirs) <= 1e-5


@pytest.mark.parametrize(
    "name", ["mpa", "soft_triple", "proxy_anchor", "proxy_sigmoid", "mv_softmax"]
)
def test_chunks_give_the_result_of_one(name, monkeypatch):
    monkeypatch.setattr(fused_module, "CHUNK_BYTES", 1)
    assert max(errors(name, (9, 150, 24, 2))) <= 1e-5


@pytest.mark.parametrize("settings", [{"alpha": 100.0}, {"margin": 2.0}])
def test_large_logits_do_not_overflow(settings):
    assert max(errors("proxy_anchor", (9, 40, 24, 1), settings=settings)) <= 3e-5


@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple"])
def test_same_bits_twice(name):
    x, y = batch(40, 70, 40)
    first, second = (
        value_and_gradients(make(name, 70, 40, 2, "fused", precision="bf16"), x, y)
        for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["mpa", "mpa_dw"])
def test_frozen_inputs_factors_and_second_backward(name):
    x, y = batch(9, 17, 20)
    loss = make(name, 17, 20, 2, "fused")
    value, grad_x, grad_w = value_and_gradients(loss, x, y)
    x.requires_grad_()
    again = loss(x, y)
    inputs = (x, loss.proxies.weight)
    for factor in (2.5, 1.0):
        got = torch.autograd.grad(factor * again, inputs, retain_graph=True)
        torch.testing.assert_close(got, (factor * grad_x, factor * grad_w))
    (only_proxies,) = torch.autograd.grad(loss(x.detach(), y), loss.proxies.weight)
    torch.testing.assert_close(only_proxies, grad_w)
    loss.proxies.weight.requires_grad_(False)
    (only_x,) = torch.autograd.grad(loss(x, y), x)
    torch.testing.assert_close(only_x, grad_x)
    with torch.no_grad():
        torch.testing.assert_close(loss(x, y), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("has_weights", [False, True])
def test_normalize_equals_torch(has_weights, dtype):
    x, y = batch(9, 5, 19)
    scales = torch.logspace(-4, 4, 9, device=DEVICE) if dtype == torch.float16 else 10.0
    x = (x * torch.as_tensor(scales, device=DEVICE).reshape(-1, 1)).to(dtype)
    x[2], x[5], y[1] = 0.0, torch.nan, base.IGNORED
    weights = torch.linspace(0.0, 2.0, 9, device=DEVICE) if has_weights else None
    y[5] = base.IGNORED
    slopes = torch.randn(9, 20, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    results = []
    for module in (fused_batch, torch_batch):
        leaf = x.clone().requires_grad_()
        result = module.normalize(leaf, y, weights, torch.float32)
        ((result.x * slopes[:, 1:]).sum() + (result.length * slopes[:, 0]).sum()).backward()
        results.append((*result, leaf.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_normalize_extreme_lengths():
    x, y = batch(6, 5, 19)
    x *= torch.tensor([1e-30, 1e-13, 1e-6, 1e6, 1e15, 1e30], device=DEVICE).unsqueeze(1)
    ours, expected = (
        module.normalize(x, y, None, torch.float32) for module in (fused_batch, torch_batch)
    )
    torch.testing.assert_close(ours[:2], expected[:2])


def test_pull_equals_torch():
    logit = 40 * torch.randn(37, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x, labels = batch(37, 9, 4)
    weights = torch.logspace(-3.0, 3.0, 37, device=DEVICE) * (labels != labels[4])
    prepared = torch_batch.normalize(x, labels, weights, torch.float32)
    results = []
    for module in (fused_batch, torch_batch):
        leaf = logit.clone().requires_grad_()
        total, factor = module.pull(leaf, prepared, 9)
        assert factor.item() == 1.0
        (first,) = torch.autograd.grad(total, leaf, retain_graph=True)
        (slope,) = torch.autograd.grad(total, leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), leaf)
        results.append((total.detach(), first, second))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_mean_equals_torch():
    terms = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights = torch.linspace(0.0, 2.0, 300, device=DEVICE)
    results = []
    for module in (fused_batch, torch_batch):
        leaf = terms.clone().requires_grad_()
        value, factor = module.mean(leaf, weights)
        (first,) = torch.autograd.grad(value, leaf, retain_graph=True)
        (slope,) = torch.autograd.grad(value.square(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), leaf)
        results.append((value.detach(), factor, first, second))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("name", ["mpa", "soft_triple"])
def test_ignored_batches_have_loss_and_gradients_0(name):
    x, y = batch(5, 9, 8)
    for value in value_and_gradients(make(name, 9, 8, 2, "fused"), x, torch.full_like(y, -1)):
        assert (value == 0).all()


@pytest.mark.parametrize("name", ["proxy_anchor", "arcface", "sphereface2"])
def test_double_backward_equals_dense(name):
    x, y = batch(7, 12, 16)
    penalties = []
    for engine in ("dense", "fused"):
        loss = make(name, 12, 16, 1, engine)
        inputs = (x.clone().requires_grad_(), loss.proxies.weight)
        gradients = torch.autograd.grad(loss(inputs[0], y), inputs, create_graph=True)
        norm = sum(gradient.square().sum() for gradient in gradients)
        penalties.append(torch.autograd.grad(norm, inputs))
    torch.testing.assert_close(*penalties, rtol=1e-4, atol=1e-4)


def test_changed_proxies_raise():
    x, y = batch(7, 12, 16)
    loss = make("proxy_anchor", 12, 16, 1, "fused")
    value = loss(x.requires_grad_(), y)
    with torch.no_grad():
        loss.proxies.weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_float64_and_many_proxies_per_class_raise():
    x, y = batch(4, 3, 8)
    with pytest.raises(ValueError, match="float32"):
        make("proxy_anchor", 3, 8, 1, "fused").double()(x.double(), y)
    with pytest.raises(ValueError, match="at most 128 proxies"):
        make("mpa", 3, 8, 129, "fused")(x, y)


@pytest.mark.parametrize(
    ("name", "settings", "lengths"),
    [
        ("curricularface", {"margin": 0.1}, 0.7),
        ("mv_softmax", {"kind": "angle", "t": 0.5}, 0.7),
        ("mv_softmax", {"scale": 3.0}, 0.7),
        ("proxy_circle", {"scale": 5.0, "margin": -0.1}, 0.0),
        ("sphereface2", {"exponent": 1.0}, 0.0),
        ("sphereface2", {"exponent": 2.3, "scale": 5.0}, 0.0),
    ],
)
def test_adjusted_negatives_near_the_class(name, settings, lengths):
    """Some negatives are hard, and some are not."""
    x, y = batch(19, 60, 24)
    results = []
    for engine in ("dense", "fused"):
        loss = make(name, 60, 24, 2, engine, ignore_above=0.4, **settings)
        if engine == "dense":
            loss = loss.double()
        unit = torch.nn.functional.normalize
        near = unit(x) + lengths * unit(loss.proxies.weight.detach()[y, 0].float())
        if name == "curricularface":
            loss.t.fill_(0.3)
        if name in {"curricularface", "mv_softmax"}:
            S = loss.similarities(near)
            own = S.gather(1, y.unsqueeze(1)).squeeze(1)
            hard = (loss.positive_logit(own, None) / loss.scale).unsqueeze(1) < S
            assert 0.01 < hard.double().mean() < 0.99
        results.append(value_and_gradients(loss, near, y))
    for expected, ours in zip(*results, strict=True):
        assert distance(ours, expected) <= 1e-5


class LearnedRate(losses.SphereFace2):
    def build(self, arguments):
        super().build(arguments)
        self.rate = torch.nn.Parameter(torch.tensor(4.0))

    def negative_logit(self, batch):
        return self.rate.expand(len(batch.x)), 0.3


class ClassWise(losses.ProxyAnchor):
    form = losses.LossForm("single", by="class", join="separate", adjust=adjustments.circle)

    def adjust_arguments(self, batch):
        return None, -0.2


@pytest.mark.parametrize("make_loss", [LearnedRate, ClassWise])
def test_adjusted_negatives_with_learned_scale_and_by_class(make_loss):
    x, y = batch(9, 30, 16)
    results = []
    for engine in ("dense", "fused"):
        torch.manual_seed(0)
        results.append(value_and_gradients(make_loss(30, 16, engine=engine).to(DEVICE), x, y))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_other_adjustments_raise():
    class Squared(losses.NormSoftmax):
        form = losses.LossForm(
            "max", by="sample", join="softmax", adjust=lambda S, *_: (S * S, 2.0 * S)
        )

    x, y = batch(4, 3, 8)
    with pytest.raises(ValueError, match="cannot adjust negatives by"):
        Squared(3, 8, engine="fused").to(DEVICE)(x, y)


def test_similarity_limit_removes_negatives():
    x, y = batch(9, 30, 16)
    weight = make("norm_softmax", 30, 16, 1, "dense").proxies.weight.detach()
    unit = torch.nn.functional.normalize(x)
    form, common = losses.LOSSES["norm_softmax"].form, (1.0, 20.0, 0.0)
    limited = [
        engine(base.Problem(unit, weight, y, form, *common, ignore_above=0.1)).negatives
        for engine in (base.dense, fused_module.fused)
    ]
    torch.testing.assert_close(*limited, rtol=1e-5, atol=1e-5)
    everything = base.dense(base.Problem(unit, weight, y, form, *common)).negatives
    assert (limited[1] < everything).all()


@pytest.mark.parametrize("name", ["norm_softmax", "proxy_anchor", "uniface"])
def test_shard_of_the_classes(name):
    """The labels of other ranks are outside 0 … C − 1."""
    x, y = batch(11, 30, 16)
    loss = make(name, 20, 16, 1, "dense")
    unit = torch.nn.functional.normalize(x)
    problem = base.Problem(
        unit, loss.proxies.weight.detach(), y - 5, loss.form, 1.0, 20.0, 0.0, is_shard=True,
        class_weight=0.1 if loss.form.by == "class" else None,
        log_weights=torch.zeros(11, device=DEVICE) if loss.form.by == "class" else None,
    )  # fmt: skip
    ours, expected = fused_module.fused(problem), base.dense(problem)
    inside = (y >= 5) & (y < 25)
    assert 0 < inside.sum() < 11
    torch.testing.assert_close(ours.positive[inside], expected.positive[inside])
    torch.testing.assert_close(ours.negatives, expected.negatives)


@pytest.mark.parametrize("name", ["arcface", "mpa", "uniface", "curricularface", "sphereface2"])
def test_sampled_negatives_equal_dense(name):
    x, y = batch(9, 60, 16)
    results = []
    for engine in ("dense", "fused"):
        loss = make(name, 60, 16, 2, engine, sampled_negatives=0.5).train()
        torch.manual_seed(3)
        results.append(value_and_gradients(loss, x, y))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ignore_above", [None, 0.5])
@pytest.mark.parametrize(
    "name", ["arcface", "proxy_anchor", "mpa", "uniface", "proxy_circle", "sphereface2"]
)
def test_nan_in_a_proxy_makes_the_loss_nan(name, ignore_above):
    x, y = batch(6, 20, 8)
    loss = make(name, 20, 8, 2, "fused", ignore_above=ignore_above)
    with torch.no_grad():
        loss.proxies.weight[3, 0, 0] = torch.nan
    assert loss(x, y).isnan()


def test_integer_class_weights_and_learned_scales_equal_dense():
    class Learned(losses.ProxyAnchor):
        def build(self, arguments):
            super().build(arguments)
            self.rate = torch.nn.Parameter(torch.tensor(4.0))

        def negative_logit(self, batch):
            return self.rate.expand(len(batch.x)), 0.3

        def negative_weight(self, classes, present):
            return 2

    x, y = batch(7, 20, 8)
    results = []
    for engine in ("dense", "fused"):
        torch.manual_seed(0)
        loss = Learned(20, 8, engine=engine).to(DEVICE)
        results.append(value_and_gradients(loss, x, y))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_precision_of_the_newer_setting_of_torch(monkeypatch):
    def fail():
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", fail)
    assert fused_module.torch_precision() in ("high", "highest")


def test_infinite_weights_of_ignored_samples():
    x, y = batch(6, 9, 8)
    y[2] = base.IGNORED
    weights = torch.ones(6, device=DEVICE)
    weights[2] = torch.inf
    loss = make("arcface", 9, 8, 1, "fused")
    loss.check_labels = False
    assert loss(x, y, weights).isfinite()


def test_updates_of_proxies_that_are_not_contiguous():
    x, y = batch(9, 30, 16)
    results = []
    for is_contiguous in (True, False):
        loss = make("arcface", 30, 16, 1, "fused").train()
        if not is_contiguous:
            weight = loss.proxies.weight.data
            loss.proxies.weight.data = weight.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        loss.proxy_optimizer = losses.ProxySGD(loss.proxies, 0.1)
        value_and_gradients(loss, x, y)
        results.append(loss.proxies.weight.detach())
    torch.testing.assert_close(*results)


@needs_gpu
@pytest.mark.parametrize("name", NAMES)
def test_fused_losses_do_not_synchronize(name):
    loss = make(name, 5000, 64, 2, "fused")
    loss.check_labels = False
    x, y = batch(32, 5000, 64)
    value_and_gradients(loss, x, y)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        value_and_gradients(loss, x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple"])
def test_fused_losses_run_in_cuda_graphs(name):
    loss = make(name, 5000, 64, 2, "fused")
    loss.check_labels = False
    x, y = batch(32, 5000, 64)
    expected = value_and_gradients(loss, x, y)
    x.requires_grad_()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.autograd.grad(loss(x, y), (x, loss.proxies.weight))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value = loss(x, y)
        got = torch.autograd.grad(value, (x, loss.proxies.weight))
    graph.replay()
    for one, other in zip((value, *got), expected, strict=True):
        assert torch.equal(one.detach(), other)


@needs_gpu
@pytest.mark.parametrize("name", ["proxy_anchor", "soft_triple", "sphereface"])
def test_make_graphed_callables(name):
    k = 2 if name == "soft_triple" else 1
    loss = make(name, 300, 64, k, "fused")
    loss.check_labels = False
    x, y = batch(96, 300, 64)
    expected = value_and_gradients(make(name, 300, 64, k, "fused"), x, y)
    torch.cuda.make_graphed_callables(loss, (torch.randn_like(x, requires_grad=True), y.clone()))
    actual = value_and_gradients(loss, x, y)
    for one, two in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, two)


@needs_gpu
def test_autocast_and_compile():
    loss = make("mpa", 5000, 64, 2, "fused")
    x, y = batch(32, 5000, 64)
    expected = value_and_gradients(loss, x, y)
    for ours, theirs in zip(
        value_and_gradients(torch.compile(loss), x, y)[:2], expected, strict=False
    ):
        torch.testing.assert_close(ours, theirs)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        low = value_and_gradients(loss, x, y)
    assert 1e-5 < distance(low[2], expected[2].double()) < 0.05


@pytest.mark.parametrize(("rule", "settings"), OPTIMIZERS)
@pytest.mark.parametrize("name", ["mpa", "soft_triple"] if ON_GPU else ["soft_triple"])
def test_update_in_backward_equals_a_step_after_backward(name, rule, settings, monkeypatch):
    monkeypatch.setattr(fused_module, "CHUNK_BYTES", 1)
    classes, dim = (150, 24) if ON_GPU else (70, 8)
    loss = make(name, classes, dim, 2, "fused").train()
    plain = make(name, classes, dim, 2, "dense").double().train()
    loss.proxy_optimizer = rule(loss.proxies, **settings).to(DEVICE)
    step = rule(plain.proxies, **settings).double().to(DEVICE)
    for seed in (1, 2):
        x, y = batch(9, classes, dim, seed)
        value, grad_x, none = value_and_gradients(loss, x, y)
        expected, expected_x, gradient = value_and_gradients(plain, x, y)
        step.update(slice(0, classes), gradient)
        assert none is None
        assert distance(value, expected) <= 3e-5
        assert distance(grad_x, expected_x) <= 3e-5
        assert distance(loss.proxies.weight, plain.proxies.weight) <= 3e-5


def test_second_backward_raises_after_an_update():
    loss = make("proxy_anchor", 30, 16, 1, "fused").train()
    loss.proxy_optimizer = losses.ProxySGD(loss.proxies, 0.1)
    x, y = batch(9, 30, 16)
    value = loss(x.requires_grad_(), y)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
