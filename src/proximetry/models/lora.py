"""LoRA (Hu et al. 2022) through peft: low-rank updates are trained in the place of weights.

Adapters live in the embedder that a run trains, and nowhere else. What is evaluated and saved is a
plain twin of it, into whose weights they are merged.
"""

from functools import partial
from typing import Any

import torch
from torch import nn

from proximetry._common import UsageError, need, random_numbers_kept
from proximetry.models.backbones import build
from proximetry.models.batchnorm import evaluating
from proximetry.models.embedder import Embedder

_BLOCKS = "blocks"  # what timm calls the list of a network's blocks


def add_lora(embedder: Embedder, rank: int, alpha: float | None = None) -> Embedder:
    """Put low-rank updates beside the linear layers in the blocks of the backbone; return it.

    Of the backbone nothing else is trained from then on. The updates begin at zero and are scaled
    by alpha / rank, by default 1.
    """
    peft = need("peft", "lora", "LoRA")
    part: Any
    for part in embedder.backbone.modules():
        if hasattr(part, "qkv_bias_separate"):
            # Else these take the weights past the layer, and an adapter in it would do nothing.
            part.qkv_bias_separate = True
    targets = _linear_layers(embedder)
    if not targets:
        raise UsageError(
            f"LoRA is for the linear layers in the blocks of transformers, and "
            f"{embedder.architecture.backbone} has none"
        )
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha or rank, lora_dropout=0.0, target_modules=targets
    )
    peft.inject_adapter_in_model(config, embedder.backbone)
    for name, value in embedder.backbone.named_parameters():
        value.requires_grad_(".lora_" in name)
        if not value.requires_grad:
            embedder._idle.add(name)
    return embedder


def has_lora(embedder: Embedder) -> bool:
    """Whether there are adapters in the network."""
    return any(".lora_" in name for name, _ in embedder.backbone.named_parameters())


def plain_twin(embedder: Embedder) -> Embedder:
    """Return the network without adapters, as `Embedder.load` makes it; `merge_lora` fills it."""
    with random_numbers_kept():
        model = build(embedder.architecture.backbone, embedder.preprocessing.crop)
        plain = Embedder(model, embedder.architecture, embedder.preprocessing, embedder.weights)
    return plain.to(next(embedder.parameters()).device)


@torch.no_grad()
def merge_lora(trained: Embedder, plain: Embedder) -> None:
    """Write the weights of a network with adapters into its plain twin, in place."""
    state = trained.backbone.state_dict()
    state = {key.replace(".base_layer.", "."): value for key, value in state.items()}
    for name, layer in trained.backbone.named_modules():
        if hasattr(layer, "lora_A"):
            update: Any = layer.get_delta_weight("default")
            state[f"{name}.weight"] = state[f"{name}.weight"] + update
    plain.backbone.load_state_dict({k: v for k, v in state.items() if ".lora_" not in k})
    for part in ("pooling", "head"):
        getattr(plain, part).load_state_dict(getattr(trained, part).state_dict())


@torch.no_grad()
def _linear_layers(embedder: Embedder) -> list[str]:
    """The linear layers in the blocks of the backbone that are called as layers."""
    found: list[str] = []
    hooks = [
        layer.register_forward_hook(partial(_note, found, name))
        for name, layer in embedder.backbone.named_modules()
        if isinstance(layer, nn.Linear) and _BLOCKS in name.split(".")
    ]
    try:
        if hooks:
            pixels = next(embedder.parameters()).new_zeros(1, 3, *embedder.preprocessing.crop)
            with evaluating(embedder):
                embedder.features(pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(found))


def _note(found: list[str], name: str, *_: Any) -> None:
    found.append(name)
