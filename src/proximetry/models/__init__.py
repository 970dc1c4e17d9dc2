"""Models: an `Embedder` is a backbone, a pooling and a head."""

try:
    import PIL  # noqa: F401
    import safetensors  # noqa: F401
    import timm  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"Embedders need {error.name}: pip install 'proximetry[images]'", name=error.name
    ) from error

from proximetry.models.backbones import list_backbones
from proximetry.models.batchnorm import freeze_batchnorm, set_batchnorm_momentum
from proximetry.models.embedder import Architecture, Embedder
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
    "freeze_batchnorm",
    "list_backbones",
    "set_batchnorm_momentum",
]
