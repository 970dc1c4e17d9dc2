"""`Architecture`: the settings that define an embedder's network."""

from dataclasses import asdict, dataclass
from typing import Any

from proximetry._util.formatting import format_value
from proximetry.models.constants import (
    MAX_BITS,
    MAX_DIM,
    MAX_TTA_CROPS,
    POOLINGS,
    SIMILARITIES,
    Similarity,
)


@dataclass(frozen=True)
class Architecture:
    """Settings of an embedder's network; see `Embedder.create`.

    Attributes:
        backbone: a name of timm, "vectors", "vectors_mlp", or "custom:" and the class name of a
            module passed to `Embedder.wrap`.
        dim: dimension of the linear head; 0 means no head.
        pooling: never "auto" in an embedder.
        binary: whether the signs of the `dim` dimensions are trained as binary codes.
    """

    backbone: str
    dim: int
    pooling: str
    layer_norm: bool
    normalize: bool
    flip_tta: bool = False
    similarity: Similarity = "cosine"
    binary: bool = False
    tta_crops: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        flags = dict.fromkeys(("layer_norm", "normalize", "flip_tta", "binary"), (False, True))
        for name, choices in {"pooling": POOLINGS, "similarity": SIMILARITIES, **flags}.items():
            value = getattr(self, name)
            if type(value) is not type(choices[0]) or value not in choices:
                expected = ", ".join(map(repr, choices))
                raise ValueError(f"{name} must be one of {expected}, got {format_value(value)}")
        if type(self.dim) is not int or not 0 <= self.dim <= MAX_DIM:
            raise ValueError(f"dim must be between 0 and {MAX_DIM}, got {format_value(self.dim)}")
        crops = self.tta_crops
        if (
            not isinstance(crops, list | tuple)
            or len(crops) > MAX_TTA_CROPS
            or not all(isinstance(fraction, float) and 0 < fraction < 1 for fraction in crops)
        ):
            raise ValueError(
                f"tta_crops must be at most {MAX_TTA_CROPS} numbers between 0 and 1, such as "
                f"[0.875], got {format_value(crops)}"
            )
        object.__setattr__(self, "tta_crops", tuple(crops))  # JSON has lists
        if self.binary and (self.dim % 8 or not 8 <= self.dim <= MAX_BITS):
            raise ValueError(f"bits must be a multiple of 8 from 8 to {MAX_BITS}, got {self.dim}")
        if self.binary and self.similarity != "cosine":
            raise ValueError(f"bits need similarity 'cosine', got {self.similarity!r}")

    def to_json(self) -> dict[str, Any]:
        """Return the settings as saved and hashed in fingerprints.

        Settings added by later versions are omitted at their defaults: fingerprints stay the same.
        """
        settings = {**asdict(self), "tta_crops": list(self.tta_crops)}
        return {k: v for k, v in settings.items() if v or k not in ("binary", "tta_crops")}
