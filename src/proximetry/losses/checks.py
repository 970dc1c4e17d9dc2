"""Validation of settings and batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proximetry._util.errors import is_whole
from proximetry._util.labels import as_labels as label_array

Labels = Tensor | NDArray[np.integer[Any]] | Sequence[int]
"""Class indices [B], or `IGNORED`."""

Weights = Tensor | NDArray[np.floating[Any]] | Sequence[float]
"""Sample weights [B]."""

#: The label of samples that a loss ignores.
IGNORED = -1

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

#: Larger settings, or positive ones below its inverse, overflow float32 in a loss.
LARGEST = 1e30

T = TypeVar("T")


@dataclass(frozen=True)
class Check(Generic[T]):
    """Called with a name and a value, return the value as stored or raise a ValueError."""

    kind: str
    """The accepted type, for tables."""
    function: Callable[[str, Any], T]

    def __call__(self, name: str, value: Any) -> T:
        """Return the validated value."""
        return self.function(name, value)


def check(kind: str) -> Callable[[Callable[[str, Any], T]], Check[T]]:
    """Make a function of (name, value) a `Check`."""
    return lambda function: Check(kind, function)


def number(kind: str, low: float, high: float, expected: str) -> Check[float]:
    """Return a check that accepts real numbers from ``low`` to ``high`` as floats."""

    def convert(name: str, value: Any) -> float:
        is_real = isinstance(value, Real) and not isinstance(value, bool)
        if not (is_real and low <= float(value) <= high):
            raise ValueError(f"{name} must be {expected}, got {value!r}")
        return float(value)

    return Check(kind, convert)


finite = number("float", -LARGEST, LARGEST, f"a finite number of at most {LARGEST:g}")
positive = number("float > 0", 1 / LARGEST, LARGEST, f"positive and at most {LARGEST:g}")
non_negative = number("float ≥ 0", 0.0, LARGEST, f"from 0 to {LARGEST:g}")
cosine_margin = number("−2 ≤ float ≤ 2", -2.0, 2.0, "between -2 and 2, as cosines differ")
fraction = number("0 ≤ float ≤ 1", 0.0, 1.0, "between 0 and 1")
angle = number("0 ≤ float < π", 0.0, math.nextafter(math.pi, 0.0), "an angle in radians below π")


@check("int ≥ 1")
def count(name: str, value: Any) -> int:
    """Return ``value`` as an int; reject anything but integers from 1."""
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


@check("bool")
def boolean(name: str, value: Any) -> bool:
    """Return ``value``; reject anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def one_of(*choices: str) -> Check[str]:
    """Return a check that accepts ``choices`` only."""

    def choose(name: str, value: Any) -> str:
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
        return str(value)

    return Check(", ".join(f'"{choice}"' for choice in choices), choose)


def optional(inner: Check[T]) -> Check[T | None]:
    """Return a check that also accepts None."""
    return Check(
        f"{inner.kind} or None", lambda name, value: None if value is None else inner(name, value)
    )


def check_embeddings(embeddings: Tensor, dim: int | None = None) -> None:
    """Raise unless ``embeddings`` is a floating-point batch [B, D]."""
    if not isinstance(embeddings, Tensor):
        raise ValueError(f"embeddings must be a tensor, got {type(embeddings).__name__}")
    shape = list(embeddings.shape)
    if len(shape) != 2 or shape[0] == 0:
        raise ValueError(f"embeddings must be [batch, dim] and not empty, got shape {shape}")
    if dim is not None and shape[1] != dim:
        raise ValueError(f"embeddings have {shape[1]} dimensions, the loss was made for {dim}")
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating point, got {embeddings.dtype}")


def batch(embeddings: Tensor, labels: Labels, dim: int | None = None) -> Tensor:
    """Return the labels as int64; raise if shapes or types of the batch do not match."""
    check_embeddings(embeddings, dim)
    if not isinstance(labels, Tensor):
        labels = as_labels(embeddings, labels)
    if labels.dtype not in _INTEGERS:
        raise ValueError(f"labels must be integers (class indices), got {labels.dtype}")
    if labels.shape != embeddings.shape[:1]:
        got = list(labels.shape)
        raise ValueError(f"{len(embeddings)} embeddings need as many labels, got {got}")
    return labels.long()


def as_labels(embeddings: Tensor, labels: Labels) -> Tensor:
    """Return labels as a tensor on the device of the embeddings; tensors stay as they are."""
    if isinstance(labels, Tensor):
        return labels
    array = label_array(labels, len(embeddings))
    if array.dtype.kind != "i":
        raise ValueError("labels must be integers (class indices), got strings")
    return torch.from_numpy(array).to(embeddings.device)


def label_range(labels: Tensor, num_classes: int) -> None:
    """Raise for labels that are neither a class nor -1. On CUDA this waits for the device."""
    low, high = torch.stack(labels.aminmax()).tolist()
    if low < IGNORED or high >= num_classes:
        wrong = low if low < IGNORED else high
        position = int((labels == wrong).nonzero()[0, 0])
        raise ValueError(
            f"label {wrong} (position {position} of the batch) is outside 0..{num_classes - 1}; "
            f"the loss was made for {num_classes} classes, and ignores the label {IGNORED}"
        )


def sample_weights(embeddings: Tensor, weights: Weights) -> Tensor:
    """Return the weights as a tensor [B] on the device of the embeddings."""
    if not isinstance(weights, Tensor):
        try:
            weights = torch.from_numpy(np.asarray(weights, np.float64))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"weights must be numbers, one for each sample: {error}") from error
    if weights.is_complex():
        raise ValueError(f"weights must be real numbers, got {weights.dtype}")
    if weights.shape != embeddings.shape[:1]:
        got = list(weights.shape)
        raise ValueError(f"{len(embeddings)} embeddings need as many weights, got {got}")
    return weights.detach().to(embeddings.device)


def weight_range(weights: Tensor) -> None:
    """Raise for negative or non-finite weights. On CUDA this waits for the device."""
    wrong = ~((weights >= 0) & torch.isfinite(weights))
    if wrong.any():
        position = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"weight {weights[position].item()} (position {position} of the batch) must be a "
            "finite number of at least 0"
        )


def effective_weights(labels: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the weight of each sample [B]: 1 without weights, 0 for `IGNORED`."""
    plain = torch.ones_like(labels, dtype=dtype) if weights is None else weights.to(dtype)
    return plain.masked_fill(labels == IGNORED, 0.0)
