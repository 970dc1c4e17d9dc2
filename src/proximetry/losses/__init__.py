"""Proxy-based losses for metric learning: one formulation, two engines, plain modules.

    loss = ProxyAnchor(num_classes=100, dim=512)
    loss(embeddings, labels).backward()

Each loss holds its proxies in ``loss.proxies``; hand them to the optimizer with
`parameter_groups`. Regularizers are modules over the proxies and can be added to any loss.
"""

from collections.abc import Mapping
from typing import Any

from proximetry._util.errors import UsageError, closest, shown
from proximetry.losses.base import LOSSES, ProxyLoss
from proximetry.losses.dense import LossForm
from proximetry.losses.distributed import Gathered, gathered
from proximetry.losses.pairs import PAIR_LOSSES, PairLoss
from proximetry.losses.proxies import Proxies, parameter_groups
from proximetry.losses.proxy_anchor import MPA, MPAAP, MPADW, ProxyAnchor
from proximetry.losses.regularizers import (
    AngularCenterLoss,
    CenterLoss,
    ExclusiveRegularizer,
    IntraClassRegularizer,
    QuantizationLoss,
)
from proximetry.losses.settings import Setting, check_all, setting
from proximetry.losses.softmax import (
    ArcFace,
    CosFace,
    NormSoftmax,
    ProxyNCA,
    ProxyNCAPlusPlus,
    SoftTriple,
    SphereFace,
)


def create(name: str, num_classes: int, dim: int, **settings: Any) -> ProxyLoss:
    """Return a proxy loss by name; raise ValueError for unknown names, settings and values."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}{closest(name, LOSSES)}")
    check_settings(name, settings)
    return LOSSES[name](num_classes, dim, **settings)


def loss_settings(name: str) -> dict[str, Setting]:
    """Return the settings of a loss by name: a proxy loss or ``"pairs/<name>"``."""
    known = {loss: cls.settings() for loss, cls in LOSSES.items()}
    known |= {f"pairs/{loss}": form.settings for loss, form in PAIR_LOSSES.items()}
    if name not in known:
        raise UsageError(f"unknown loss {shown(name)}{closest(name, known)}")
    return known[name]


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for an unknown loss, setting or invalid value."""
    check_all(f"loss {name!r}", loss_settings(name), settings)


__all__ = [
    "LOSSES",
    "MPA",
    "MPAAP",
    "MPADW",
    "PAIR_LOSSES",
    "AngularCenterLoss",
    "ArcFace",
    "CenterLoss",
    "CosFace",
    "ExclusiveRegularizer",
    "Gathered",
    "IntraClassRegularizer",
    "LossForm",
    "NormSoftmax",
    "PairLoss",
    "Proxies",
    "ProxyAnchor",
    "ProxyLoss",
    "ProxyNCA",
    "ProxyNCAPlusPlus",
    "QuantizationLoss",
    "Setting",
    "SoftTriple",
    "SphereFace",
    "check_settings",
    "create",
    "gathered",
    "loss_settings",
    "parameter_groups",
    "setting",
]
