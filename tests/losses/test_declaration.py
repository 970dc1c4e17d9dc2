"""Declaration and validation of the settings of losses."""

import copy
import inspect
import re
import sys
from dataclasses import InitVar

import pytest

from proximetry import losses
from proximetry.losses.settings import count, finite, positive, setting
from tests.losses.cases import NAMES, make

PAIRS = [f"pairs/{name}" for name in losses.PAIR_LOSSES]


def test_signature_follows_the_declaration():
    assert str(inspect.signature(losses.ProxyAnchor)).startswith(
        "(num_classes: int, dim: int, *, alpha: float = 32.0, margin: float = 0.1, engine:"
    )
    order = {name: list(inspect.signature(cls).parameters) for name, cls in losses.LOSSES.items()}
    assert order["mpa"][2:7] == ["proxies_per_class", "alpha", "margin", "gamma", "tau"]
    assert order["soft_triple"][2:7] == ["proxies_per_class", "scale", "gamma", "margin", "tau"]
    assert order["arcface"][2:4] == ["scale", "margin"]
    settings = {"alpha": 5.0, "margin": 0.2, "gamma": 0.3, "tau": 0.4}
    loss = losses.MPA(3, 4, proxies_per_class=2, negative_classes="absent", **settings)
    assert (loss.alpha, loss.margin, loss.gamma, loss.tau) == (5.0, 0.2, 0.3, 0.4)
    assert (loss.num_classes, loss.dim, loss.proxies_per_class) == (3, 4, 2)
    assert loss.proxies.proxies_per_class == 2
    assert "alpha=5.0, margin=0.2" in repr(loss)
    assert copy.deepcopy(loss).margin == 0.2


@pytest.mark.parametrize("name", [*NAMES, *PAIRS])
def test_every_setting_has_a_valid_default_and_a_description(name):
    for key, declared in losses.loss_settings(name).items():
        assert declared.check(key, declared.default) == declared.default
        assert declared.help
        losses.check_settings(name, {key: declared.default})


BAD = [
    ("proxy_ancor", {}, "did you mean 'proxy_anchor'"),
    ("xyz", {}, "Valid names: .*proxy_anchor"),
    ("proxy_anchor", {"alpha": 0.0}, "alpha .* 0.0"),
    ("proxy_anchor", {"alpha": 0.1, "margin": 32}, "margin .* 32"),
    ("proxy_anchor", {"alpha": float("nan")}, "alpha .* got nan"),
    ("proxy_anchor", {"alpha": 1e300}, r"alpha .* got 1e\+300"),
    ("proxy_nca", {"temperature": 1e-300}, "temperature .* got 1e-300"),
    ("proxy_anchor", {"alpha": "32"}, "alpha .* got '32'"),
    ("proxy_anchor", {"engine": "fast"}, "engine .* got 'fast'"),
    ("mpa", {"proxies_per_class": 0}, "proxies_per_class .* got 0"),
    ("mpa", {"tau": -1.0}, "tau .* -1.0"),
    ("mpa", {"negative_classes": "some"}, "negative_classes .* got 'some'"),
    ("arcface", {"label_smoothing": 1.5}, "label_smoothing .* 1.5"),
    ("proxy_nca_plus_plus", {"learn_temperature": "no"}, "learn_temperature .* got 'no'"),
    ("arcface", {"margin": 3.5}, "margin .* radians .* 3.5"),
    ("sphereface", {"margin": 1.5}, "margin .* got 1.5"),
    ("mpa", {"alhpa": 3.0}, "loss 'mpa' has no setting 'alhpa', did you mean 'alpha'?"),
    ("mpa_dw", {"negative_classes": "all"}, "'mpa_dw' has no setting 'negative_classes'"),
]
BAD_NAMES = [
    ("triplet", {}, "'pairs/triplet'"),
    ("pairs/triplet", {"marign": 1.0}, "'margin'"),
    ("pairs/triplet", {"margin": "wide"}, "margin .* 'wide'"),
    ("pairs/triplet", {"memory": 0}, "memory .* 0"),
    ("pairs/n_pair", {"memory": 8}, "'memory'"),
    ("proxy_anchor", {"dim": 3}, "'dim'"),
]


@pytest.mark.parametrize(("name", "settings", "message"), [*BAD, *BAD_NAMES])
def test_invalid_settings_are_rejected(name, settings, message):
    with pytest.raises(ValueError, match=message):
        losses.check_settings(name, settings)
    if (name, settings, message) in BAD:
        with pytest.raises(ValueError, match=message):
            losses.create(name, 3, 4, **settings)


def test_checking_pair_losses_needs_no_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    losses.check_settings("pairs/margin", {"beta": 1.0, "memory": 8})
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install '.[pairs]'")):
        losses.PairLoss("triplet")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: losses.ProxyAnchor(0, 4), ValueError, "num_classes .* got 0"),
        (lambda: losses.ProxyAnchor(2.5, 4), ValueError, "num_classes .* got 2.5"),
        (lambda: losses.MPA(3, 4, alhpa=1.0), TypeError, "MPA has no setting 'alhpa', did you"),
        (lambda: losses.MPA(3, 4, temperature=1), TypeError, "'temperature'. Valid names: num_c"),
        (lambda: losses.MPA(3), TypeError, "MPA: missing a required argument: 'dim'"),
        (lambda: losses.ProxyAnchor(3, 4, 32.0), TypeError, "too many positional"),
        (lambda: losses.LossForm("single", "class", "softmax"), ValueError, "softmax"),
        (lambda: losses.LossForm("double", "class", "separate"), ValueError, "got 'double'"),
    ],
)
def test_constructor_rejects_invalid_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_validated_on_assignment(name):
    loss = make(name)
    for key, declared in loss.settings().items():
        if declared.is_constant:
            with pytest.raises(AttributeError, match=f"{key} cannot be changed"):
                setattr(loss, key, declared.default)
            continue
        before = getattr(loss, key)
        with pytest.raises(ValueError, match=key):
            setattr(loss, key, float("nan"))
        assert getattr(loss, key) == before


@pytest.mark.parametrize("setting_name", ["gamma", "tau", "label_smoothing"])
@pytest.mark.parametrize("name", NAMES)
def test_undeclared_setting_cannot_be_assigned(name, setting_name):
    loss = make(name)
    if setting_name in losses.loss_settings(name):
        setattr(loss, setting_name, 0.3)
        assert getattr(loss, setting_name) == 0.3
        return
    before = getattr(loss, setting_name)
    with pytest.raises(AttributeError, match=f"has no setting '{setting_name}'"):
        setattr(loss, setting_name, 0.3)
    assert getattr(loss, setting_name) == before


def test_custom_loss_is_declared_registered_and_subclassed(monkeypatch):
    known = losses.LOSSES.copy()
    monkeypatch.setattr("proximetry.losses.base.LOSSES", known)
    monkeypatch.setattr("proximetry.losses.base.LOSS_SETTINGS", {})

    class Plain(losses.ProxyLoss, name="plain"):
        form = losses.LossForm("mean", by="sample", join="softmax")
        proxies_per_class: InitVar[int] = setting(count, "proxies per class", default=3)
        scale: float = setting(positive, "scale", default=4.0)

    class Sharper(Plain):
        extra: float = setting(finite, "a setting more", default=0.0)
        scale: float = setting(positive, "scale", default=8.0)

    assert known == {**losses.LOSSES, "plain": Plain}
    assert list(Sharper.settings()) == [
        *("proxies_per_class", "scale", "extra"),
        *losses.ProxyLoss.settings(),
    ]
    assert Plain(2, 3).scale == 4.0
    assert Sharper(2, 3, proxies_per_class=1).scale == 8.0
    assert Sharper(2, 3, proxies_per_class=1).proxies.weight.shape == (2, 1, 3)
    for name in ("Other", "MPA"):
        with pytest.raises(ValueError, match="already registered for MPA: 'mpa'"):
            type(name, (losses.ProxyLoss,), {}, name="mpa")
