"""LoRA (Hu et al. 2022) with peft: train low-rank updates instead of weights.

Only the embedder in training has adapters. A copy without adapters, into whose weights they are
merged, is evaluated and saved.
"""

from typing import Any

import torch
from torch import nn

from proximetry._util.errors import UsageError
from proximetry._util.imports import import_optional
from proximetry._util.machine import preserve_rng_state
from proximetry.models.backbones import build, evaluation_mode
from proximetry.models.embedder import Embedder


def add_lora(embedder: Embedder, rank: int, alpha: float | None = None) -> Embedder:
    """Add adapters to the linear layers in the backbone's blocks and freeze its other parameters.

    Updates start at zero and are scaled by alpha / rank, by default 1. Returns the embedder.
    """
    peft = import_optional("peft", "lora", "LoRA")
    part: Any
    for part in embedder.backbone.modules():
        if hasattr(part, "qkv_bias_separate"):
            # Otherwise the weight is used without calling the layer, bypassing the adapter.
            part.qkv_bias_separate = True
    targets = _linear_layers(embedder)
    if not targets:
        raise UsageError(
            "LoRA needs linear layers in transformer blocks, and "
            f"{embedder.architecture.backbone} has none. Use a transformer."
        )
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha or rank, lora_dropout=0.0, target_modules=targets
    )
    peft.inject_adapter_in_model(config, embedder.backbone)
    for name, value in embedder.backbone.named_parameters():
        value.requires_grad_(".lora_" in name)
    embedder.keep_frozen()
    return embedder


def merged_copy(embedder: Embedder) -> Embedder:
    """Return a copy of the network without adapters, with random weights for `merge_lora`."""
    with preserve_rng_state():
        model = build(embedder.architecture.backbone, embedder.preprocessing.crop)
        merged = Embedder(model, embedder.architecture, embedder.preprocessing, embedder.weights)
    return merged.to(next(embedder.parameters()).device)


@torch.no_grad()
def merge_lora(trained: Embedder, merged: Embedder) -> None:
    """Copy the weights of a network, with its adapters merged, to a `merged_copy` of it."""
    state = {k.replace(".base_layer.", "."): v for k, v in trained.backbone.state_dict().items()}
    for name, layer in trained.backbone.named_modules():
        if hasattr(layer, "lora_A"):
            update: Any = layer.get_delta_weight("default")
            state[f"{name}.weight"] = state[f"{name}.weight"] + update
    merged.backbone.load_state_dict({k: v for k, v in state.items() if ".lora_" not in k})
    for part in ("pooling", "head"):
        getattr(merged, part).load_state_dict(getattr(trained, part).state_dict())


@torch.no_grad()
def _linear_layers(embedder: Embedder) -> list[str]:
    """Return the names of linear layers in the backbone's blocks that are called as modules."""
    called: dict[str, None] = {}
    hooks = [
        layer.register_forward_hook(lambda *_, name=name: called.setdefault(name))
        for name, layer in embedder.backbone.named_modules()
        if isinstance(layer, nn.Linear) and "blocks" in name.split(".")  # timm's name
    ]
    try:
        if hooks:
            pixels = next(embedder.parameters()).new_zeros(1, 3, *embedder.preprocessing.crop)
            with evaluation_mode(embedder):
                embedder.features(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return list(called)
