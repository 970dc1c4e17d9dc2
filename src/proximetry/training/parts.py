"""The parts of a run as its recipe wants them: the network and the optimiser."""

from typing import Any

import torch

from proximetry.models import Embedder, freeze_batchnorm
from proximetry.training.folder import RunError
from proximetry.training.objective import Objective
from proximetry.training.recipe import Model, Recipe


def make_embedder(m: Model) -> Embedder:
    """The network, with the statistics of batch normalisation frozen or not."""
    embedder = Embedder.create(
        m.backbone,
        m.dim,
        pooling=m.pooling,
        layer_norm=m.layer_norm,
        normalize=m.normalize,
        mirror=m.mirror,
        weights=m.weights,
        image_size=m.image_size,
        resize=m.resize,
    )
    if m.freeze_batchnorm:
        freeze_batchnorm(embedder)
    return embedder


def make_optimizer(
    recipe: Recipe, embedder: Embedder, objective: Objective
) -> torch.optim.Optimizer:
    """The optimiser with a learning rate for each part."""
    o = recipe.optimizer
    parts, others = embedder.parameter_parts(), objective.parameter_parts()
    heads = [*parts["head"], *others["head"]]
    groups: list[dict[str, Any]] = [
        {"name": "backbone", "params": parts["backbone"], "lr": o.lr},
        {"name": "head", "params": heads, "lr": o.lr * o.head_multiplier},
        {"name": "proxies", "params": others["proxies"], "lr": o.lr * o.proxy_multiplier},
        {"name": "loss", "params": others["loss"], "lr": o.lr},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise RunError("nothing to train: the model has no parameters and the loss no proxies")
    # One launch for all parameters; on the CPU the plain form is kept.
    fused = True if all(p.is_cuda for group in groups for p in group["params"]) else None
    match o.name:
        case "adamw":
            return torch.optim.AdamW(groups, eps=o.eps, weight_decay=o.weight_decay, fused=fused)
        case "adam":
            return torch.optim.Adam(groups, eps=o.eps, weight_decay=o.weight_decay, fused=fused)
        case "sgd":
            return torch.optim.SGD(
                groups, momentum=o.momentum, weight_decay=o.weight_decay, fused=fused
            )
