"""Models: an `Embedder` is a backbone, a pooling and a head.

What is listed here is imported when it is first used, so that `proximetry.models.names` costs
nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proximetry.models.backbones import list_backbones
    from proximetry.models.batchnorm import freeze_batchnorm, set_batchnorm_momentum
    from proximetry.models.embedder import Architecture, Embedder, evaluating
    from proximetry.models.pooling import GeM
    from proximetry.models.preprocessing import Preprocessing
    from proximetry.models.weights import WeightsError, WeightsRecord

__all__ = [
    "Architecture",
    "Embedder",
    "GeM",
    "Preprocessing",
    "WeightsError",
    "WeightsRecord",
    "evaluating",
    "freeze_batchnorm",
    "list_backbones",
    "set_batchnorm_momentum",
]

_MODULES = {
    "Preprocessing": "preprocessing",
    "GeM": "pooling",
    "WeightsError": "weights",
    "WeightsRecord": "weights",
    "freeze_batchnorm": "batchnorm",
    "list_backbones": "backbones",
    "set_batchnorm_momentum": "batchnorm",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_MODULES.get(name, 'embedder')}")
    except ModuleNotFoundError as error:
        if error.name not in ("PIL", "huggingface_hub", "safetensors", "timm"):
            raise
        raise ModuleNotFoundError(
            f"Embedders need {error.name}: pip install 'proximetry[images]'", name=error.name
        ) from error
    return getattr(module, name)
