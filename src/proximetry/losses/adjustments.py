"""Functions φ(S) of the similarities to other classes, and their derivatives (`LossForm.adjust`).

They get similarities [B, n], a limit [B, 1] above which negatives are hard, or None, and a number.
For the fused engine, `fused_kernels` has a function of the same name for each.
"""

from typing import Any

import torch
from torch import Tensor


def curricular(S: Tensor, limit: Any, t: Any) -> tuple[Tensor, Tensor]:
    """Return S(t + S) if S is hard, else S."""
    hard = limit < S
    return torch.where(hard, S * (t + S), S), torch.where(hard, t + 2.0 * S, 1.0)


def misclassified(S: Tensor, limit: Any, t: Any) -> tuple[Tensor, Tensor]:
    """Return (t + 1)S + t if S is hard, else S."""
    extra = t * (limit < S).to(S)
    return S + extra * (S + 1.0), extra + 1.0


def circle(S: Tensor, limit: Any, margin: Any) -> tuple[Tensor, Tensor]:
    """Return [S + m]₊(S − m): the weight has no gradient."""
    weight = (S.detach() + margin).clamp(min=0.0)
    return weight * (S - margin), weight


def power(S: Tensor, limit: Any, exponent: Any) -> tuple[Tensor, Tensor]:
    """Return 2((S + 1)/2)^t − 1."""
    half = (0.5 * (S + 1.0)).clamp(min=0.0)
    slope = half ** (exponent - 1.0)
    return 2.0 * half * slope - 1.0, exponent * slope


#: The functions that the fused engine supports.
ADJUSTMENTS = (curricular, misclassified, circle, power)
