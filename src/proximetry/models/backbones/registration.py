"""What a model needs to be one of timm's: a configuration and an entry point."""

from dataclasses import asdict
from typing import Any, TypeVar

import timm
from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def config(
    *,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    first_conv: str,
    classifier: str,
    pool_size: tuple[int, int],
    input_size: tuple[int, int, int] = (3, 224, 224),
    interpolation: str = "bicubic",
    crop_pct: float = 0.875,
) -> dict[str, Any]:
    """Return an entry of a module's `default_cfgs`, which `register_model` looks for."""
    return {
        "num_classes": 1000,
        "input_size": input_size,
        "pool_size": pool_size,
        "crop_pct": crop_pct,
        "interpolation": interpolation,
        "mean": mean,
        "std": std,
        "first_conv": first_conv,
        "classifier": classifier,
    }


def adopt_config(model: Module, name: str, pretrained: bool) -> Module:
    """Hang timm's configuration on the model; refuse weights that nobody publishes."""
    if pretrained:
        raise ValueError(
            f"no weights are published for {name}: load a file, or train from "
            "random weights with pretrained=False"
        )
    registered = timm.get_pretrained_cfg(name)
    values: Any = asdict(registered) if registered else {}
    model.pretrained_cfg = model.default_cfg = values
    return model
