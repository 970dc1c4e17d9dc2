"""Sharded proxies: value and gradients of the unsharded loss for the batches of all ranks."""

import json

import pytest
import torch

from proximetry import losses
from proximetry.losses import sharded
from tests.training.ranks import Ranks

# Compares one rank of a sharded loss with the loss of all classes and all samples.
COMPARE = """
import json, sys
import torch
import torch.distributed as dist
from proximetry import losses

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
classes, dim = 7, 5
torch.manual_seed(0)
x, y, w = torch.randn(12, dim).double(), torch.randint(0, classes, (12,)), torch.rand(12).double()
y[3], w[5] = -1, 0.0
# Uneven batches, and one rank without a sample.
cuts = {2: [(0, 7, 12), (0, 0, 12)], 3: [(0, 5, 6, 12), (0, 7, 7, 12)]}[ranks]


def make(name, classes, k=2, **settings):
    torch.manual_seed(0)
    if "proxies_per_class" in losses.loss_settings(name):
        settings["proxies_per_class"] = k
    return losses.create(name, classes, dim, **settings)


def run(loss, x, y, w, **options):
    x = x.clone().requires_grad_()
    loss.zero_grad(set_to_none=True)
    value = loss(x, y, w, **options)
    value.square().sum().backward()
    others = [p.grad for name, p in loss.named_parameters() if name != "proxies.weight"]
    return value.detach(), x.grad, loss.proxies.weight.grad, others, dict(loss.named_buffers())


def compare(
    name, classes=classes, weights=None, cut=cuts[0], reduction="mean", truncate_dim=None,
    **settings,
):
    if name == "proxy_nca_plus_plus":
        settings["learn_temperature"] = True
    if name == "elasticface":  # random margins: see below
        settings["deviation"] = 0.0
    whole = make(name, classes, **settings).double()
    shard = losses.shard(make(name, classes, **settings).double())
    labels, mine = y % classes, slice(cut[rank], cut[rank + 1])
    labels = labels.masked_fill(y == -1, -1)
    options = {"reduction": reduction, "truncate_dim": truncate_dim}
    expected = run(whole, x, labels, weights, **options)
    parts = None if weights is None else weights[mine]
    value, dx, dw, others, buffers = run(shard, x[mine], labels[mine], parts, **options)
    low, high = shard.proxies.start, shard.proxies.stop
    target = expected[0]
    if reduction == "none":
        target = target[low:high] if whole.form.by == "class" else target[mine]
    pairs = [(value, target), (dx / ranks, expected[1][mine]), (dw, expected[2][low:high])]
    for number, (a, b) in enumerate([*pairs, *zip(others, expected[3], strict=True)]):
        assert a.shape == b.shape and (a - b).norm() <= 1e-8 * b.norm(), (number, a, b)
    assert all(torch.equal(buffers[key], expected[4][key]) for key in buffers)


failed = []
def case(*arguments, **options):
    try:
        compare(*arguments, **options)
    except Exception as error:
        failed.append(f"{arguments} {options}: {error!r}")


for name in losses.LOSSES:
    for engine in ("dense", "streamed"):
        case(name, engine=engine)
        for reduction in ("mean", "sum", "none"):
            case(name, weights=w, reduction=reduction, engine=engine)
        case(name, cut=cuts[1], engine=engine)
        case(name, classes=ranks, engine=engine)  # a class for each rank
        case(name, truncate_dim=3, engine=engine)
    if "label_smoothing" in losses.loss_settings(name):
        case(name, weights=w, label_smoothing=0.2, engine=engine)
        case(name, reduction="none", label_smoothing=0.2)
case("mpa", negative_classes="absent")
case("mpa", negative_classes="absent", weights=w, reduction="none", engine="streamed")

# All ranks draw the same random margins and dimensions.
torch.manual_seed(rank)
for loss in (make("elasticface", classes), make("arcface", classes, sampled_dims=0.6)):
    values = [torch.empty(1) for _ in range(ranks)]
    dist.all_gather(values, losses.shard(loss)(x.float(), y).detach()[None])
    if len(set(values[i].item() for i in range(ranks))) > 1:
        failed.append(f"random numbers: {values}")

errors = {}
def error_of(key, call):
    try:
        call()
    except (ValueError, NotImplementedError) as error:
        errors[key] = str(error)


loss = losses.shard(make("mpa", classes, k=3))
z = x.float()
error_of("few", lambda: losses.shard(make("mpa", ranks - 1)))
error_of("twice", lambda: losses.shard(loss))
error_of("gathered", lambda: losses.gathered(loss))
error_of("grow", lambda: loss.proxies.grow(1, optimizer=None))
error_of("label", lambda: loss(z, (y + rank * 9).tolist()))
error_of("shape", lambda: loss(z, y[: 12 - rank]))
error_of("weights", lambda: loss(z, y, w if rank else None))
error_of("exclusive", lambda: losses.ExclusiveRegularizer()(loss.proxies))
error_of("synthesis", lambda: losses.shard(make("arcface", classes, k=1, synthesis=0.5))(z, y))
error_of("center", lambda: losses.AngularCenterLoss()(z, y, loss.proxies))

# Regularizers and projection of the rank's own proxies.
whole, term = make("mpa", classes, k=3), losses.IntraClassRegularizer()
low, high = loss.proxies.start, loss.proxies.stop
for proxies in (whole.proxies, loss.proxies):
    proxies.zero_grad(set_to_none=True)
    value = term(proxies)
    value.backward()
    if proxies is whole.proxies:
        expected = value
torch.testing.assert_close(value, expected)
torch.testing.assert_close(loss.proxies.weight.grad, whole.proxies.weight.grad[low:high])
assert torch.equal(loss.proxies.project_().weight, whole.proxies.project_().weight[low:high])

# A rank whose embeddings have no gradient.
loss(z if rank else z.clone().requires_grad_(), y).backward()

# Drawn on the meta device.
torch.manual_seed(3 + rank)
with torch.device("meta"):
    drawn = losses.create("soft_triple", 10_000, 4, proxies_per_class=2)
    learned = losses.create("proxy_nca_plus_plus", 9, 4, temperature=0.3, learn_temperature=True)
    sized = losses.create("dynamic_margin", 9, 4)
drawn, learned, sized = losses.shard(drawn), losses.shard(learned), losses.shard(sized)
sized.set_class_counts(range(1, 10))
sized(torch.randn(12, 4), y + 2)
result = {
    "failed": failed,
    "errors": errors,
    "start": drawn.proxies.start,
    "drawn": drawn.proxies.weight.tolist(),
    "temperature": learned.temperature,
    "classes": learned.proxies.num_classes,
}
open(f"{sys.argv[1]}/{rank}.json", "w").write(json.dumps(result))
dist.destroy_process_group()
"""


def drawn_by_one():
    torch.manual_seed(3)
    with torch.device("meta"):
        loss = losses.create("soft_triple", 10_000, 4, proxies_per_class=2)
    return losses.shard(loss).proxies.weight


def test_rank_draws_its_own_proxies_of_a_billion_classes(monkeypatch):
    monkeypatch.setattr(sharded, "_rank", lambda group: 1023)
    monkeypatch.setattr(sharded, "_ranks", lambda group: 1024)
    monkeypatch.setattr(sharded.dist, "get_backend", lambda group: "gloo")
    with torch.device("meta"):
        loss = losses.create("arcface", 10**9, 2)
    proxies = losses.ShardedProxies(loss.proxies, None, seed=0)
    assert (proxies.start, proxies.stop, proxies.num_classes) == (999_023_438, 10**9, 10**9)
    assert proxies.weight.shape == (976_562, 1, 2)
    assert proxies.weight.std().item() == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize("size", [2, 3])
def test_sharded_loss_equals_unsharded_loss_of_all_batches(server, tmp_path, size):
    ranks = Ranks(server, tmp_path, COMPARE, tmp_path, size=size)
    assert ranks.ended() == [0] * size, "".join(map(ranks.output, range(size)))
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(size)]
    for rank, result in enumerate(results):
        assert result["failed"] == []
        errors = result["errors"]
        assert f"number of ranks, {size}" in errors["few"]
        assert "already" in errors["twice"]
        assert "Call it directly" in errors["gathered"]
        assert "not supported" in errors["grow"]
        assert "position" in errors["label"]
        assert ("shape [12]" if rank else "on rank 1") in errors["shape"]
        assert "Pass weights on all ranks" in errors["weights"]
        assert "sharded" in errors["exclusive"]
        assert "sharded" in errors["center"]
        assert "sharded" in errors["synthesis"]
        assert result["temperature"] == pytest.approx(0.3)
        assert result["classes"] == 9
    drawn = torch.cat([torch.tensor(result["drawn"]) for result in results])
    assert torch.equal(drawn, drawn_by_one())
