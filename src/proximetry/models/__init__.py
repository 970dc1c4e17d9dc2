"""Models: an `Embedder` is a backbone, a pooling and a head.

Names are imported on first use; `proximetry.models.constants` imports no torch.
"""

from typing import TYPE_CHECKING

from proximetry._util.imports import lazy_exports

if TYPE_CHECKING:
    from proximetry.models.architecture import Architecture
    from proximetry.models.backbones import evaluation_mode, freeze_batchnorm, list_backbones
    from proximetry.models.embedder import Embedder
    from proximetry.models.explanation import Explanation
    from proximetry.models.pooling import GeM
    from proximetry.models.preprocessing import Preprocessing, Tensors
    from proximetry.models.weights import WeightsError, WeightsRecord

__all__ = [
    "Architecture",
    "Embedder",
    "Explanation",
    "GeM",
    "Preprocessing",
    "Tensors",
    "WeightsError",
    "WeightsRecord",
    "evaluation_mode",
    "freeze_batchnorm",
    "list_backbones",
]

__getattr__ = lazy_exports(
    __name__,
    {
        "architecture": ("Architecture",),
        "backbones": ("evaluation_mode", "freeze_batchnorm", "list_backbones"),
        "embedder": ("Embedder",),
        "explanation": ("Explanation",),
        "pooling": ("GeM",),
        "preprocessing": ("Preprocessing", "Tensors"),
        "weights": ("WeightsError", "WeightsRecord"),
    },
    extra="images",
)
