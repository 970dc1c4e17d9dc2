"""Convert labels of any type to NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.formatting import format_value

Labels = Tensor | npt.NDArray[Any] | Sequence[int] | Sequence[str]


def as_array(values: Any, name: str) -> npt.NDArray[Any]:
    """Convert a tensor, a list or a table column to a NumPy array."""
    if isinstance(values, Tensor):
        if values.is_meta:
            raise ValueError(f"{name} must have values, got a tensor on the device 'meta'")
        values = values.detach().cpu()
        # NumPy has no bfloat16.
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # type: ignore[no-any-return]
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name} cannot be converted to an array: {error}") from error


def as_labels(values: Labels | None, length: int, name: str = "labels") -> npt.NDArray[Any]:
    """Return labels as a one-dimensional NumPy array of int64 or of strings."""
    array = as_array(values, name)
    if array.ndim != 1:
        got = format_value(values) if array.ndim == 0 else f"shape {array.shape}"
        raise ValueError(f"{name} must be a sequence of integers or strings, got {got}")
    if len(array) != length:
        raise ValueError(f"{name} has {len(array)} entries for {length} items")
    if array.dtype.kind in "OT":
        array = _unbox(array, name)
    if len(array) == 0:
        # NumPy converts an empty list to float.
        return array if array.dtype.kind == "U" else array.astype(np.int64)
    if array.dtype.kind == "U":
        if isinstance(values, Sequence):
            # NumPy converts a list that mixes numbers and text to text, and drops null characters.
            if not all(isinstance(entry, str) for entry in values):
                raise ValueError(f"{name} mixes strings and other types. Use one type of label.")
            if any(str(entry).endswith("\0") for entry in values):
                raise ValueError(
                    f"{name} end in null characters, which NumPy drops. Remove the characters."
                )
        return array
    if array.dtype.kind not in "iub":
        raise ValueError(f"{name} must be integers or strings, got {array.dtype}")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has a value above 2^63 − 1: {array.max()}")
    return array.astype(np.int64)


def _unbox(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Convert an array of Python objects, as in tables, to strings or integers."""
    entries = array.tolist()
    for kind, dtype in ((str, np.str_), ((int, np.integer), np.int64)):
        if all(isinstance(entry, kind) for entry in entries):
            try:
                return np.array(entries, dtype)
            except OverflowError:
                largest = max(entries, key=abs)
                raise ValueError(f"{name} has a value beyond 64 bits: {largest}") from None
    return array
