"""Pooling of feature maps [B, C, H, W] to vectors [B, C]."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn


class Maximum(nn.Module):
    """Maximum over all positions (ProxyNCA++), plus the mean if `add_mean` (Proxy-Anchor)."""

    def __init__(self, add_mean: bool = False) -> None:
        super().__init__()
        self.add_mean = add_mean

    def forward(self, features: Tensor) -> Tensor:
        """Pool [B, C, H, W] to [B, C]."""
        largest = features.amax((2, 3))
        return features.mean((2, 3)) + largest if self.add_mean else largest


class GeM(nn.Module):
    """Generalized mean (mean of x^p)^(1/p) over all positions; p = 3 is MPA's cubic pooling.

    Values are clamped to at least `eps`. Computed in float32: cubes overflow float16 above 40.
    """

    def __init__(self, p: float = 3.0, learned: bool = False, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.p: nn.Parameter | float = nn.Parameter(torch.tensor(p)) if learned else p

    def forward(self, features: Tensor) -> Tensor:
        """Pool [B, C, H, W] to [B, C]."""
        if features.dtype in (torch.float16, torch.bfloat16):
            features = features.float()
        with torch.autocast(features.device.type, enabled=False):
            return features.clamp(min=self.eps).pow(self.p).mean((2, 3)).pow(1 / self.p)


POOLING_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "avg": partial(nn.AdaptiveAvgPool2d, 1),
    "max": Maximum,
    "avg+max": partial(Maximum, add_mean=True),
    "gem": GeM,
    "gem-learned": partial(GeM, learned=True),
}
"""Layers of the poolings, whose result is flattened; for all others the backbone pools."""
