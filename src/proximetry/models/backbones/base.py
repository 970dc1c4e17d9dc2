"""What our own backbones share: timm's interface, and the decorator that registers them."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, ClassVar, TypeVar

import timm
from timm.models import register_model
from torch import Tensor, nn

from proximetry.models.preprocessing import Channels


class Backbone(nn.Module):
    """A network that ends in a feature map; subclasses define `forward_features`."""

    num_features: int
    # All of these are set by `register_backbone`.
    default_cfg: dict[str, Any]
    pretrained_cfg: dict[str, Any]
    pixel_format: ClassVar[dict[str, Any]]
    default_pooling: ClassVar[str]

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Average the map and classify."""
        x = x.mean((2, 3))
        return x if pre_logits else self.get_submodule(self.default_cfg["classifier"])(x)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, or the pooled features when made for no classes."""
        return self.forward_head(self.forward_features(x))


Kind = TypeVar("Kind", bound=type[Backbone])

default_cfgs: dict[str, dict[str, Any]] = {}  # where timm's register_model looks


def register_backbone(
    name: str,
    *,
    scale: float = 1 / 255,
    channels: Channels = "RGB",
    pooling: str = "avg",
    **config: Any,
) -> Callable[[Kind], Kind]:
    """Register a class with timm, together with everything that is known about it.

    Args:
        name: under which timm and `Embedder.create` make it.
        scale, channels: as in `Preprocessing`; timm's configuration has no such fields.
        pooling: what pooling="auto" stands for.
        config: fields of timm's `PretrainedCfg`: mean, std, input_size, classifier, …
    """
    default_cfgs[name] = config

    def register(kind: Kind) -> Kind:
        kind.pixel_format = {"scale": scale, "channels": channels}
        kind.default_pooling = pooling

        def make(
            pretrained: bool = False,
            pretrained_cfg: Any = None,
            pretrained_cfg_overlay: Any = None,
            cache_dir: str | None = None,
            **settings: Any,
        ) -> Backbone:
            if pretrained:
                raise ValueError(
                    f"no weights are published for {name}: load a file, or train from "
                    "random weights with pretrained=False"
                )
            model = kind(**settings)
            model.pretrained_cfg = model.default_cfg = asdict(timm.get_pretrained_cfg(name))  # type: ignore[arg-type]
            return model

        make.__name__ = name
        register_model(make)
        return kind

    return register
