"""Proxy-based losses for metric learning: one table, one engine, plain modules.

    loss = ProxyAnchor(num_classes=100, dim=512)
    loss(embeddings, labels).backward()

Each loss holds its proxies in ``loss.proxies``; hand them to the optimiser with
`parameter_groups`. Regularisers are modules over the proxies and can be added to any loss.
"""

from typing import Any

from proximetry._common import closest
from proximetry.losses.anchor import MPA, MPAAP, MPADW, ProxyAnchor
from proximetry.losses.proxies import Proxies, parameter_groups
from proximetry.losses.proxy_loss import ProxyLoss
from proximetry.losses.regularizers import CenterLoss, ExclusiveRegularizer, IntraClassRegularizer
from proximetry.losses.softmax import (
    ArcFace,
    CosFace,
    NormSoftmax,
    ProxyNCA,
    ProxyNCAPlusPlus,
    SoftTriple,
    SphereFace,
)
from proximetry.losses.table import Row

#: Every proxy loss by its name in recipes and on the command line.
LOSSES: dict[str, type[ProxyLoss]] = {
    "proxy_nca": ProxyNCA,
    "proxy_nca_plus_plus": ProxyNCAPlusPlus,
    "proxy_anchor": ProxyAnchor,
    "soft_triple": SoftTriple,
    "mpa": MPA,
    "mpa_dw": MPADW,
    "mpa_ap": MPAAP,
    "norm_softmax": NormSoftmax,
    "cosface": CosFace,
    "arcface": ArcFace,
    "sphereface": SphereFace,
}


def create(name: str, num_classes: int, dim: int, **settings: Any) -> ProxyLoss:
    """Make a loss by name; the settings are those of its class, and unknown ones are errors."""
    if name not in LOSSES:
        known = ", ".join(LOSSES)
        raise ValueError(f"unknown loss {name!r}{closest(name, LOSSES)} Known: {known}")
    try:
        return LOSSES[name](num_classes, dim, **settings)
    except TypeError as error:
        raise ValueError(f"loss {name!r}: {error}") from error


__all__ = [
    "LOSSES",
    "MPA",
    "MPAAP",
    "MPADW",
    "ArcFace",
    "CenterLoss",
    "CosFace",
    "ExclusiveRegularizer",
    "IntraClassRegularizer",
    "NormSoftmax",
    "Proxies",
    "ProxyAnchor",
    "ProxyLoss",
    "ProxyNCA",
    "ProxyNCAPlusPlus",
    "Row",
    "SoftTriple",
    "SphereFace",
    "create",
    "parameter_groups",
]


def check_settings(name, settings):
    if not name.startswith("pairs/"):
        create(name, 2, 2, **settings)
