"""Sums that come out the same every time."""

from torch import Tensor


def add_rows_(to: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Add each of ``values`` to one of the rows of ``to``, in an order that is fixed.

    On CUDA ``index_add`` adds in whatever order its threads arrive, and equal runs part in their
    last digits; ``index_put`` sorts first.
    """
    if to.is_cuda:
        return to.index_put_((rows,), values, accumulate=True)
    return to.index_add_(0, rows, values)
