"""Proxies: initialization, names, state, growth, optimizer groups."""

import copy
import math

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from proximetry import losses
from proximetry.losses import Proxies, parameter_groups
from tests.losses.cases import NAMES, batch, make


@pytest.mark.parametrize(
    ("init", "deviation"),
    [
        ("kaiming_normal", math.sqrt(2 / 600)),
        ("kaiming_uniform", 1 / math.sqrt(600) / math.sqrt(3)),
        ("normal", 1 / 8),
        ("small_normal", 0.01),
    ],
)
def test_initialization_has_the_published_deviation(init, deviation):
    generator = torch.Generator().manual_seed(0)
    weight = Proxies(200, 64, 3, init=init, generator=generator).weight
    assert weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert weight.mean().abs().item() < deviation * 0.02


def test_sphere_initialization_and_projection():
    proxies = Proxies(50, 8, 2, init="sphere")
    torch.testing.assert_close(proxies.weight.norm(dim=-1), torch.ones(50, 2))
    with torch.no_grad():
        proxies.weight.mul_(torch.rand(50, 2, 1) + 0.5)
    direction = torch.nn.functional.normalize(proxies.weight, dim=-1)
    assert proxies.project_() is proxies
    torch.testing.assert_close(proxies.weight.detach(), direction.detach())
    assert proxies.weight.requires_grad


def test_default_initialization_of_losses():
    inits = {name: make(name).proxies.init for name in NAMES}
    assert inits["proxy_anchor"] == inits["mpa"] == "kaiming_normal"
    assert inits["soft_triple"] == "kaiming_uniform"
    assert inits["proxy_nca"] == inits["proxy_nca_plus_plus"] == "normal"
    assert inits["cosface"] == inits["arcface"] == "small_normal"
    assert inits["sphereface"] == "sphere"


@pytest.mark.parametrize("name", NAMES)
def test_state_round_trips_through_safetensors(name):
    x, y = batch(dtype=torch.float32)
    loss = make(name, k=2, seed=5)
    # The last is the name of a folder that is not UTF-8.
    loss.proxies.names = [*(f"Klasse {i} 한" for i in range(6)), "cl\udce4ss"]
    loss(x, y)  # SphereFace counts a step
    other = make(name, k=2, seed=6)
    other.load_state_dict(load(save(loss.state_dict())))
    assert other.proxies.names == loss.proxies.names
    assert other(x, y).item() == loss(x, y).item()
    assert torch.equal(other.proxies.weight, loss.proxies.weight)


def test_loading_state_without_names_removes_them():
    named = Proxies(2, 3, names=["a", "b"])
    assert copy.deepcopy(named).names == ["a", "b"]
    named.load_state_dict(Proxies(2, 3).state_dict())
    assert named.names is None
    with pytest.raises(RuntimeError, match="size mismatch"):
        named.load_state_dict(Proxies(3, 3).state_dict())


@pytest.mark.parametrize(
    ("names", "message"),
    [(["a"], "got 1"), (["a", "a"], "duplicate"), ("ab", "sequence"), ([1, 2], "strings")],
)
def test_names_reject_duplicates_and_wrong_types(names, message):
    with pytest.raises(ValueError, match=message):
        Proxies(2, 3, names=names)


@pytest.mark.parametrize("optimizer_type", [torch.optim.AdamW, torch.optim.SGD])
def test_grow_preserves_old_proxies_and_moments(optimizer_type):
    loss = make("mpa", k=2)
    options = {"momentum": 0.9} if optimizer_type is torch.optim.SGD else {}
    optimizer = optimizer_type(parameter_groups(nn.Linear(2, 2), loss, lr=0.01), **options)
    x, y = batch(dtype=torch.float32)
    loss(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    old = loss.proxies.weight.detach().clone()
    assert loss.proxies.grow(3, optimizer=optimizer) == range(7, 10)
    weight = loss.proxies.weight
    assert weight.shape == (10, 2, 5)
    assert torch.equal(weight[:7], old)
    lengths = weight.norm(dim=-1)
    torch.testing.assert_close(lengths[7:], lengths[:7].mean().expand(3, 2))
    moments = [v for v in optimizer.state[weight].values() if v.shape == weight.shape]
    assert moments
    assert all((m[7:] == 0).all() and (m[:7] != 0).any() for m in moments)
    y[0] = 9
    loss(x, y).backward()
    optimizer.step()
    assert not torch.equal(loss.proxies.weight[9], weight.new_zeros(2, 5))
    assert not torch.equal(loss.proxies.weight[:7], old)


def test_growing_from_examples():
    proxies = Proxies(4, 3, names=list("abcd"))
    examples = [torch.tensor([[2.0, 0.1, 0.0], [4.0, -0.2, 0.0]]), torch.tensor([[0.0, 0.0, -3.0]])]
    assert proxies.grow(["e", "f"], optimizer=None, init=examples) == range(4, 6)
    assert proxies.names == list("abcdef")
    direction = torch.nn.functional.normalize(proxies.weight[4:, 0], dim=-1)
    torch.testing.assert_close(direction[0], torch.tensor([1.0, 0.0, 0.0]), atol=1e-3, rtol=0)
    torch.testing.assert_close(direction[1], torch.tensor([0.0, 0.0, -1.0]))


def test_growing_several_proxies_covers_the_groups_of_the_examples():
    proxies = Proxies(4, 3, 2)
    axis = torch.eye(3)
    noise = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)) * 0.05
    examples = torch.cat([axis[0] + noise[:10], axis[1] + noise[10:]])
    proxies.grow(1, optimizer=None, init=[examples])
    cosine = torch.nn.functional.normalize(proxies.weight[4].detach(), dim=-1) @ axis[:2].T
    assert sorted(cosine.argmax(1).tolist()) == [0, 1]
    assert (cosine.amax(1) > 0.99).all()
    # Fewer examples than proxies: near, but not the same.
    proxies.grow(1, optimizer=None, init=[axis[:1]])
    assert not torch.equal(proxies.weight[5, 0], proxies.weight[5, 1])


PLAIN, NAMED = Proxies(2, 3), Proxies(2, 3, names=["a", "b"])


@pytest.mark.parametrize(
    ("proxies", "new_classes", "options", "message"),
    [
        (NAMED, 1, {}, "old classes have names"),
        (NAMED, ["a"], {}, "duplicate"),
        (PLAIN, 0, {}, "new_classes .* got 0"),
        (PLAIN, 1.5, {}, "new_classes .* got 1.5"),
        (PLAIN, ["x"], {}, "have no names"),
        (PLAIN, "robin", {}, "new_classes .* got 'robin'"),
        (PLAIN, 1, {"init": "flat"}, "init .* got 'flat'"),
        (PLAIN, 2, {"init": torch.zeros(3, 3)}, r"got \[3, 3\]"),
        (Proxies(2, 3, 2), 1, {"init": torch.ones(1, 3)}, r"\[1, 2, 3\], got \[1, 3\]"),
        (PLAIN, 2, {"init": [torch.zeros(1, 3)]}, "got 1"),
        (PLAIN, 1, {"init": [torch.zeros(1, 4)]}, r"got \[1, 4\]"),
        (PLAIN, 2, {"init": torch.eye(3)[:2] / 0}, "init of new class 0 is not finite"),
        (PLAIN, 2, {"init": [torch.ones(2, 3), torch.eye(3) * torch.nan]}, "class 1"),
        (PLAIN, 2, {"init": torch.diag(torch.tensor([1.0, 0, 0]))[:2]}, "class 1 has no"),
        (PLAIN, 1, {"init": [torch.tensor([[1.0, 0, 0], [-1, 0, 0]])]}, "examples cancel"),
        (
            PLAIN,
            1,
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            "does not contain",
        ),
    ],
)
def test_grow_rejects_invalid_arguments(proxies, new_classes, options, message):
    with pytest.raises(ValueError, match=message):
        proxies.grow(new_classes, **{"optimizer": None} | options)
    assert proxies.num_classes == 2


def test_parameter_groups_contain_every_parameter_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5))
    model[0].requires_grad_(False)
    loss = losses.ProxyNCAPlusPlus(7, 5, learn_temperature=True)
    groups = parameter_groups(model, loss, lr=1e-3, proxy_lr_multiplier=50.0, weight_decay=1e-4)
    assert [g["name"] for g in groups] == ["model", "proxies", "loss"]
    assert [g["lr"] for g in groups] == [1e-3, pytest.approx(0.05), 1e-3]
    assert [len(g["params"]) for g in groups] == [2, 1, 1]
    assert groups[1]["params"][0] is loss.proxies.weight
    assert all(g["weight_decay"] == 1e-4 for g in groups)
    torch.optim.AdamW(groups)


def test_parameter_groups_of_a_model_with_parts():
    backbone, head = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 5)
    model, objective = nn.Sequential(backbone, head), nn.ModuleDict({"loss": make("proxy_anchor")})
    parts = {"backbone": [*backbone.parameters()], "head": [*head.parameters()]}
    model.parameter_parts = lambda: parts  # as the Embedder has it
    groups = parameter_groups(model, objective, lr=1e-3, head_lr_multiplier=10.0)
    assert [g["name"] for g in groups] == ["backbone", "head", "proxies"]
    assert [g["lr"] for g in groups] == [1e-3, pytest.approx(1e-2), pytest.approx(0.1)]
    assert [len(g["params"]) for g in groups] == [2, 2, 1]  # frozen ones too
    groups = parameter_groups(model, nn.Identity(), lr=1e-3, require_proxies=False)
    assert [g["name"] for g in groups] == ["backbone", "head"]


def test_training_a_few_steps_separates_classes():
    """The proxies and a linear model learn a small problem with every loss."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(6, 12, generator=generator)
    y = torch.arange(60) % 6
    data = centers[y] + 0.3 * torch.randn(60, 12, generator=generator)
    for name in NAMES:
        torch.manual_seed(0)
        model, loss = nn.Linear(12, 8), make(name, 6, 8, k=2)
        optimizer = torch.optim.Adam(parameter_groups(model, loss, lr=1e-2, proxy_lr_multiplier=3))
        first = loss(model(data), y).item()
        for _ in range(60):
            optimizer.zero_grad()
            value = loss(model(data), y)
            value.backward()
            optimizer.step()
        assert value.item() < first, name
        assert (loss.similarities(model(data)).argmax(1) == y).float().mean() > 0.95, name


MODEL, LOSS = nn.Linear(4, 5), make("proxy_anchor")


@pytest.mark.parametrize(
    ("modules", "options", "message"),
    [
        ([], {"lr": 1e-3}, "proxies"),
        ([nn.Linear(2, 2)], {"lr": 1e-3}, "proxies"),
        ([nn.ModuleList([MODEL]), LOSS], {"lr": 1}, "duplicate"),
        ([LOSS, LOSS], {"lr": 1e-3}, "duplicate"),
        ([LOSS], {"lr": 0}, "lr .* 0"),
        ([LOSS], {"lr": 1, "head_lr_multiplier": 9}, "Linear"),
    ],
)
def test_parameter_groups_reject_invalid_arguments(modules, options, message):
    with pytest.raises(ValueError, match=message):
        parameter_groups(MODEL, *modules, **options)


def test_running_mean_moves_the_proxies_of_the_batch_only():
    loss = make("norm_softmax", classes=7).double()
    x, y = batch()
    x, y = torch.cat([x, torch.full_like(x[:1], torch.nan)]), torch.cat([y, torch.tensor([-1])])
    old = loss.proxies.weight.detach().clone()
    assert loss.proxies.update_mean_(x, y, momentum=0.8) is loss.proxies
    for c in range(7):
        samples = [x[i] / x[i].norm() for i in range(len(x)) if y[i] == c]
        expected = old[c, 0]
        if samples:
            mean = sum(samples) / len(samples)
            expected = 0.8 * old[c, 0] / old[c, 0].norm() + 0.2 * mean
            expected = expected / expected.norm()
        torch.testing.assert_close(loss.proxies.weight[c, 0].detach(), expected)
    assert loss.proxies.weight.requires_grad
    for momentum in (1.5, "fast"):
        with pytest.raises(ValueError, match=f"momentum .*{momentum}"):
            loss.proxies.update_mean_(x, y, momentum)
    x[1] = torch.inf
    assert loss.proxies.update_mean_(x, y).weight.isfinite().all()
    with pytest.raises(ValueError, match="one proxy per class, got 2"):
        Proxies(7, 5, 2).update_mean_(x, y)
