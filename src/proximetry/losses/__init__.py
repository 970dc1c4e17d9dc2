"""Proxy-based losses for metric learning: torch modules with one formulation, several engines.

    loss = ProxyAnchor(num_classes=100, dim=512)
    loss(embeddings, labels).backward()

The proxies of a loss are ``loss.proxies``; pass them to the optimizer with `parameter_groups`.
Regularizers are modules over the proxies and can be added to any loss.
"""

from proximetry.losses.base import LOSSES, ProxyLoss, create
from proximetry.losses.batch import Batch
from proximetry.losses.form import LossForm
from proximetry.losses.gathered_loss import Gathered, gathered
from proximetry.losses.pairs import PAIR_LOSSES, PairLoss
from proximetry.losses.proxies import Proxies, parameter_groups
from proximetry.losses.proxy_anchor import MPA, MPAAP, MPADW, ProxyAnchor
from proximetry.losses.proxy_optimizers import ProxyOptimizer, ProxySGD, RowwiseAdam
from proximetry.losses.regularizers import (
    AngularCenterLoss,
    CenterLoss,
    ExclusiveRegularizer,
    IntraClassRegularizer,
    QuantizationLoss,
)
from proximetry.losses.relational import RelationalLoss
from proximetry.losses.settings import Setting, check_settings, loss_settings, setting
from proximetry.losses.sharded import ShardedProxies, shard
from proximetry.losses.sigmoid import ProxySigmoid, SphereFace2, UniFace
from proximetry.losses.softmax import (
    ArcFace,
    CosFace,
    NormSoftmax,
    ProxyNCA,
    ProxyNCAPlusPlus,
    SoftTriple,
    SphereFace,
)
from proximetry.losses.softmax_margins import (
    AdaFace,
    CombinedMargin,
    DynamicMargin,
    ElasticFace,
    MagFace,
)
from proximetry.losses.softmax_negatives import CurricularFace, MVSoftmax, ProxyCircle

__all__ = [
    "LOSSES",
    "MPA",
    "MPAAP",
    "MPADW",
    "PAIR_LOSSES",
    "AdaFace",
    "AngularCenterLoss",
    "ArcFace",
    "Batch",
    "CenterLoss",
    "CombinedMargin",
    "CosFace",
    "CurricularFace",
    "DynamicMargin",
    "ElasticFace",
    "ExclusiveRegularizer",
    "Gathered",
    "IntraClassRegularizer",
    "LossForm",
    "MVSoftmax",
    "MagFace",
    "NormSoftmax",
    "PairLoss",
    "Proxies",
    "ProxyAnchor",
    "ProxyCircle",
    "ProxyLoss",
    "ProxyNCA",
    "ProxyNCAPlusPlus",
    "ProxyOptimizer",
    "ProxySGD",
    "ProxySigmoid",
    "QuantizationLoss",
    "RelationalLoss",
    "RowwiseAdam",
    "Setting",
    "ShardedProxies",
    "SoftTriple",
    "SphereFace",
    "SphereFace2",
    "UniFace",
    "check_settings",
    "create",
    "gathered",
    "loss_settings",
    "parameter_groups",
    "setting",
    "shard",
]
