"""What pixels a backbone wants, and the step from bytes to them."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from math import floor, isfinite
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

Channels = Literal["RGB", "BGR"]
Interpolation = Literal["bilinear", "bicubic"]


def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(3, 1, 1)


_kept_on_device = cache(_per_channel)


def _on_device(values: tuple[float, ...], device: torch.device) -> Tensor:
    # A copy to a GPU waits for it and cannot be captured; tracing must not see what is kept.
    if device.type == "cuda" and not torch.compiler.is_compiling():
        return _kept_on_device(values, device)
    return _per_channel(values, device)


@dataclass(frozen=True)
class Preprocessing:
    """The pixels a backbone wants.

    A picture is resized so that its short side is `resize`, cropped in the centre to `crop`
    (height, width), put into the order `channels`, multiplied by `scale` and standardised with
    `mean` and `std`, which are given in the order of `channels` and in the units after `scale`.
    """

    resize: int
    crop: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 1 / 255
    channels: Channels = "RGB"
    interpolation: Interpolation = "bicubic"

    def __post_init__(self) -> None:
        for name, value in (("resize", self.resize), ("crop", min(self.crop, default=0))):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be at least 1 pixel, got {getattr(self, name)!r}")
        if len(self.crop) != 2:
            raise ValueError(f"crop must be (height, width), got {self.crop!r}")
        if self.resize < min(self.crop):
            raise ValueError(
                f"resize {self.resize} is smaller than the crop {self.crop[0]}×{self.crop[1]}: "
                f"the picture would be padded with black; give resize >= {min(self.crop)}"
            )
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(isfinite(value) for value in values):
                raise ValueError(f"{name} must be three finite numbers, got {values!r}")
        if min(self.std) <= 0 or not self.scale > 0:
            raise ValueError(f"std {self.std!r} and scale {self.scale!r} must be positive")
        for name, kind in (("channels", Channels), ("interpolation", Interpolation)):
            if getattr(self, name) not in get_args(kind):
                known = " or ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name} must be {known}, got {getattr(self, name)!r}")

    @classmethod
    def from_timm(
        cls, config: Mapping[str, Any], crop: tuple[int, int] | None, resize: int | None
    ) -> Self:
        """Take timm's pretrained configuration; `crop` and `resize` override its sizes."""
        height, width = crop or config["input_size"][-2:]
        return cls(
            resize=resize or floor(min(height, width) / config["crop_pct"]),
            crop=(height, width),
            mean=tuple(config["mean"]),
            std=tuple(config["std"]),
            interpolation="bilinear" if config["interpolation"] == "bilinear" else "bicubic",
        )

    def normalise(self, pixels: Tensor) -> Tensor:
        """Turn RGB values 0…255, uint8 or float, [B, 3, H, W], into what the backbone takes.

        Runs on the device of `pixels` and gives float32.
        """
        if pixels.ndim != 4 or pixels.shape[1] != 3:
            raise ValueError(f"pixels must be [batch, 3, height, width], got {list(pixels.shape)}")
        if self.channels == "BGR":
            pixels = pixels.flip(1)
        # Whole numbers minus the mean first: one rounding each for the shift and the factor.
        shift = _on_device(tuple(value / self.scale for value in self.mean), pixels.device)
        factor = _on_device(tuple(self.scale / value for value in self.std), pixels.device)
        return (pixels.float() - shift) * factor

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` gave, also after a trip through a JSON file."""
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            wrong = sorted(set(values) ^ known)
            raise ValueError(f"preprocessing has missing or unknown keys: {', '.join(wrong)}")
        pairs = {name: tuple(values[name]) for name in ("crop", "mean", "std")}
        return cls(**{**values, **pairs})
