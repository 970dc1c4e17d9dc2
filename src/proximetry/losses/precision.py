"""Keeps parameters and buffers in at least float32."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class FullPrecision(nn.Module):
    """A module whose parameters and buffers never become narrower than float32.

    ``half()``, ``bfloat16()`` and ``to(dtype)`` move them at most; ``double()`` widens them.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def without_narrowing(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            if changed.is_floating_point() and changed.dtype.itemsize < 4:
                return tensor.to(changed.device)
            return changed

        super()._apply(without_narrowing, recurse)  # type: ignore[no-untyped-call]
        return self
