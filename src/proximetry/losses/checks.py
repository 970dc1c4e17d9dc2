"""Checks of settings and batches: what is refused, with a sentence that names the value."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proximetry._common import is_whole

Labels = Tensor | NDArray[np.integer[Any]] | Sequence[int]
"""What the losses take for labels: class indices [B], and `IGNORED`."""

Weights = Tensor | NDArray[np.floating[Any]] | Sequence[float]
"""What the losses take for the weights of samples [B]."""

#: The label of samples that a loss leaves out.
IGNORED = -1

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

#: Larger settings, or positive ones below its inverse, overflow float32 in a loss.
LARGEST = 1e30

T = TypeVar("T")


@dataclass(frozen=True)
class Check(Generic[T]):
    """Called with a name and a value, returns the value as it is stored, or refuses it."""

    kind: str
    """What is accepted, in a word or two, for tables."""
    function: Callable[[str, Any], T]

    def __call__(self, name: str, value: Any) -> T:
        """Return the checked value; a bad one is a ValueError that says ``name``."""
        return self.function(name, value)


def check(kind: str) -> Callable[[Callable[[str, Any], T]], Check[T]]:
    """Make a function of (name, value) a `Check`."""
    return lambda function: Check(kind, function)


@check("float")
def finite(name: str, value: Any) -> float:
    """Return ``value`` as a float; reject anything that is not a number of at most `LARGEST`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    number = float(value)
    if abs(number) > LARGEST:
        raise ValueError(f"{name} must be at most {LARGEST:g}, got {value!r}")
    return number


@check("float > 0")
def positive(name: str, value: Any) -> float:
    """Return ``value`` as a float; reject zero, negative numbers and those below 1e-30."""
    number = finite(name, value)
    if number < 1 / LARGEST:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return number


@check("float ≥ 0")
def non_negative(name: str, value: Any) -> float:
    """Return ``value`` as a float; refuse anything below zero."""
    number = finite(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return number


@check("−2 ≤ float ≤ 2")
def cosine_margin(name: str, value: Any) -> float:
    """Return ``value`` as a float; refuse more than two cosines can differ by."""
    number = finite(name, value)
    if abs(number) > 2:
        raise ValueError(f"{name} must be between -2 and 2, as cosines differ, got {value!r}")
    return number


@check("int ≥ 1")
def count(name: str, value: Any) -> int:
    """Return ``value`` as an int; refuse anything but a whole number of at least one."""
    if not is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


@check("0 ≤ float ≤ 1")
def fraction(name: str, value: Any) -> float:
    """Return ``value`` as a float; refuse anything outside 0…1."""
    number = finite(name, value)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be between 0 and 1, got {value!r}")
    return number


@check("bool")
def boolean(name: str, value: Any) -> bool:
    """Return ``value``; refuse anything but True and False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def one_of(*choices: str) -> Check[str]:
    """Make a check that refuses anything that is not among ``choices``."""

    def choose(name: str, value: Any) -> str:
        if value not in choices:
            known = ", ".join(map(repr, choices))
            raise ValueError(f"{name} must be one of {known}, got {value!r}")
        return str(value)

    return Check(", ".join(f'"{choice}"' for choice in choices), choose)


def optional(inner: Check[T]) -> Check[T | None]:
    """Make a check that also takes None."""
    return Check(
        f"{inner.kind} or None", lambda name, value: None if value is None else inner(name, value)
    )


def check_embeddings(embeddings: Tensor, dim: int | None = None) -> None:
    """Refuse what is no batch of embeddings."""
    if not isinstance(embeddings, Tensor):
        raise ValueError(f"embeddings must be a tensor, got {type(embeddings).__name__}")
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must be [batch, dim], got shape {list(embeddings.shape)}")
    if embeddings.shape[0] == 0:
        raise ValueError(f"the batch is empty: embeddings have shape {list(embeddings.shape)}")
    if dim is not None and embeddings.shape[1] != dim:
        raise ValueError(
            f"embeddings have {embeddings.shape[1]} dimensions, the loss was made for {dim}"
        )
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating point, got {embeddings.dtype}")


def batch(embeddings: Tensor, labels: Labels, dim: int | None = None) -> Tensor:
    """Return the labels as int64; refuse a batch whose shapes or types do not fit together."""
    check_embeddings(embeddings, dim)
    labels = as_labels(embeddings, labels)
    if labels.dtype not in _INTEGERS:
        raise ValueError(f"labels must be integers (class indices), got {labels.dtype}")
    if labels.ndim != 1 or labels.shape[0] != embeddings.shape[0]:
        raise ValueError(
            f"{embeddings.shape[0]} embeddings need labels of shape [{embeddings.shape[0]}], "
            f"got {list(labels.shape)}"
        )
    return labels.long()


def as_labels(embeddings: Tensor, labels: Labels) -> Tensor:
    """Return labels that are no tensor as one, beside the embeddings."""
    if isinstance(labels, Tensor):
        return labels
    return torch.from_numpy(_integers(labels)).to(embeddings.device)


def _integers(labels: Any) -> NDArray[np.int64]:
    """Return labels of any kind that NumPy makes an array of, such as a column of a table."""
    try:
        array = np.asarray(labels)
        if array.dtype.kind == "O" and array.size:  # integers that might have been missing
            array = np.array(array.tolist())
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"labels must be integers (class indices): {error}") from error
    if array.size and array.dtype.kind not in "iu":
        kind = f"{type(labels).__name__} of {array.dtype.type.__name__}"
        raise ValueError(f"labels must be integers (class indices), got {kind}")
    return array.astype(np.int64)


def label_range(labels: Tensor, num_classes: int) -> None:
    """Refuse labels that are no class of the loss, nor -1. On CUDA this waits for the device."""
    low, high = torch.stack(labels.aminmax()).tolist()
    if low < IGNORED or high >= num_classes:
        wrong = low if low < IGNORED else high
        position = int((labels == wrong).nonzero()[0, 0])
        raise ValueError(
            f"label {wrong} (position {position} of the batch) is outside 0..{num_classes - 1}; "
            f"the loss was made for {num_classes} classes, and ignores the label {IGNORED}"
        )


def sample_weights(embeddings: Tensor, weights: Weights | None) -> Tensor | None:
    """Return the weights as a tensor beside the embeddings; refuse what is no number for each."""
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        try:
            weights = torch.from_numpy(np.asarray(weights, np.float64))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"weights must be numbers, one for each sample: {error}") from error
    if weights.is_complex():
        raise ValueError(f"weights must be real numbers, got {weights.dtype}")
    if weights.ndim != 1 or weights.shape[0] != embeddings.shape[0]:
        raise ValueError(
            f"{embeddings.shape[0]} embeddings need weights of shape [{embeddings.shape[0]}], "
            f"got {list(weights.shape)}"
        )
    return weights.detach().to(embeddings.device)


def weight_range(weights: Tensor) -> None:
    """Refuse weights that are negative or not finite. On CUDA this waits for the device."""
    wrong = ~((weights >= 0) & torch.isfinite(weights))
    if wrong.any():
        position = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"weight {weights[position].item()} (position {position} of the batch) must be a "
            "finite number of at least 0"
        )


def counted(labels: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return how much each sample counts [B]: its weight, 0 for `IGNORED`, otherwise 1."""
    plain = torch.ones_like(labels, dtype=dtype) if weights is None else weights.to(dtype)
    return plain.masked_fill(labels == IGNORED, 0.0)
