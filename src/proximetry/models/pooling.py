"""From a feature map [B, C, H, W] to one vector [B, C] per image."""

import torch
from torch import Tensor, nn


class Average(nn.Module):
    """Mean over all positions."""

    def forward(self, features: Tensor) -> Tensor:
        """Pool [B, C, H, W] to [B, C]."""
        return features.mean((2, 3))


class Maximum(nn.Module):
    """Largest value over all positions (ProxyNCA++)."""

    def forward(self, features: Tensor) -> Tensor:
        """Pool [B, C, H, W] to [B, C]."""
        return features.amax((2, 3))


class AveragePlusMaximum(nn.Module):
    """Mean and largest value, added: what Proxy-Anchor's reference results were made with."""

    def forward(self, features: Tensor) -> Tensor:
        """Pool [B, C, H, W] to [B, C]."""
        return features.mean((2, 3)) + features.amax((2, 3))


class GeM(nn.Module):
    """Generalised mean (mean of x^p)^(1/p) over all positions; p = 3 is MPA's cubic pooling.

    Values below `eps` count as `eps`. Computed in float32 under autocast: a cube overflows
    float16 from 41 upwards.
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


def make_pooling(kind: str) -> nn.Module:
    """Return the module for a name of `POOLINGS` but "auto"; backbones may pool themselves."""
    modules: dict[str, nn.Module] = {
        "avg": Average(),
        "max": Maximum(),
        "avg+max": AveragePlusMaximum(),
        "gem": GeM(),
        "gem-learned": GeM(learned=True),
        "flatten": nn.Flatten(),
        "pre-logits": nn.Identity(),
        "token": nn.Identity(),
        "cls-avg": nn.Identity(),
    }
    return modules[kind]
