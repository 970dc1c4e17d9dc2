"""Refuse bad settings and bad batches with a sentence that names the offending value."""

import math

import torch
from torch import Tensor

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def finite(name: str, value: float) -> float:
    """Return ``value`` as a float; refuse anything that is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return ``value`` as a float; refuse zero and below."""
    number = finite(name, value)
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return number


def non_negative(name: str, value: float) -> float:
    """Return ``value`` as a float; refuse anything below zero."""
    number = finite(name, value)
    if number < 0:
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return number


def count(name: str, value: int) -> int:
    """Return ``value``; refuse anything but a whole number of at least one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return ``value``; refuse anything that is not among ``choices``."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def batch(embeddings: Tensor, labels: Tensor, dim: int | None = None) -> None:
    """Refuse a batch whose shapes or types do not fit together."""
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings must be [batch, dim], got shape {list(embeddings.shape)}")
    if embeddings.shape[0] == 0:
        raise ValueError(f"the batch is empty: embeddings have shape {list(embeddings.shape)}")
    if dim is not None and embeddings.shape[1] != dim:
        raise ValueError(f"embeddings are {embeddings.shape[1]} wide, the proxies {dim}")
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating point, got {embeddings.dtype}")
    if labels.dtype not in _INTEGERS:
        raise ValueError(f"labels must be integers (class indices), got {labels.dtype}")
    if labels.ndim != 1 or labels.shape[0] != embeddings.shape[0]:
        raise ValueError(
            f"{embeddings.shape[0]} embeddings need labels of shape [{embeddings.shape[0]}], "
            f"got {list(labels.shape)}"
        )


def label_range(labels: Tensor, num_classes: int) -> None:
    """Refuse labels that are no class of the loss. On CUDA this waits for the device."""
    low, high = (int(bound) for bound in torch.stack(labels.aminmax()).tolist())
    if low < 0 or high >= num_classes:
        wrong = low if low < 0 else high
        position = int((labels == wrong).nonzero()[0, 0])
        raise ValueError(
            f"label {wrong} (position {position} of the batch) is outside 0..{num_classes - 1}; "
            f"the loss was made for {num_classes} classes"
        )
