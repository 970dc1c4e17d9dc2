"""Base class of our backbones, and the decorator that registers them with timm."""

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from timm.models import build_model_with_cfg, register_model
from torch import Tensor, nn

from proximetry.models.preprocessing import Channels


class Backbone(nn.Module):
    """A network that ends in a feature map; subclasses define `forward_features`."""

    num_features: int
    default_cfg: dict[str, Any]  # set by timm
    # Both are set by `register_backbone`.
    pixel_format: ClassVar[dict[str, Any]]
    default_pooling: ClassVar[str]

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Return class scores of a feature map, or the pooled features with `pre_logits`."""
        pooled = x.mean((2, 3))
        if pre_logits:
            return pooled
        return self.get_submodule(self.default_cfg["classifier"])(pooled)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores, or the pooled features without classes."""
        return self.forward_head(self.forward_features(x))


Kind = TypeVar("Kind", bound=type[Backbone])

default_cfgs: dict[str, dict[str, Any]] = {}  # where timm's register_model looks
BACKBONES: dict[str, type[Backbone]] = {}


def register_backbone(
    name: str,
    *,
    scale: float = 1 / 255,
    channels: Channels = "RGB",
    pooling: str = "avg",
    **config: Any,
) -> Callable[[Kind], Kind]:
    """Register a class with timm.

    Args:
        name: for timm and `Embedder.create`.
        scale, channels: as in `Preprocessing`; timm's configuration has no such fields.
        pooling: meaning of pooling="auto".
        config: fields of timm's `PretrainedCfg`: mean, std, input_size, classifier, …
    """
    default_cfgs[name] = config

    def register(kind: Kind) -> Kind:
        kind.pixel_format = {"scale": scale, "channels": channels}
        kind.default_pooling = pooling
        BACKBONES[name] = kind

        def make(pretrained: bool = False, **settings: Any) -> Backbone:
            return build_model_with_cfg(
                kind, name, pretrained, kwargs_filter=("in_chans",), **settings
            )

        make.__name__ = name
        register_model(make)
        return kind

    return register
