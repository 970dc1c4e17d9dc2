"""Custom components of a run: the arguments ``data``, ``embedder`` and ``loss`` of `train`."""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from os import PathLike
from typing import Any

from torch import Tensor, nn

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_value
from proximetry.data import Catalog
from proximetry.models import Embedder
from proximetry.models.constants import CUSTOM
from proximetry.recipe.loading import RecipeError
from proximetry.recipe.schema import AUTO, CLASS_PATH, LossConfig, Recipe
from proximetry.training.sources.torch_dataset import TorchDatasets, torch_datasets


@dataclass(frozen=True)
class Components:
    """Custom data, embedder and loss; None for the recipe's.

    ``classes`` are trained without images if the data has none of them.
    """

    data: Catalog | TorchDatasets | None = None
    embedder: Embedder | None = None
    loss: nn.Module | None = None
    classes: Sequence[str] = ()


def custom_components(
    recipe: Recipe, data: Any, embedder: Any, loss: Any
) -> tuple[Recipe, Components]:
    """Validate custom components; return them and the recipe with keys that describe them."""
    changes: dict[str, Any] = {}
    if data is not None:
        if isinstance(data, str | PathLike):
            raise UsageError(
                f"data must be a Catalog or a dataset, got {format_value(data)}. For a folder of "
                "images, use Catalog.from_folder."
            )
        if not isinstance(data, Catalog):
            data = torch_datasets(data)
        name = type(data).__name__ if isinstance(data, Catalog) else data.name
        changes |= {"data.dataset": f"{CUSTOM}{name}", "data.root": None}
    if embedder is not None:
        changes |= _describe_embedder(recipe, embedder)
    if loss is not None:
        loss = _as_module(loss)
        changes |= {"loss.name": f"{CUSTOM}{type(loss).__name__}", "loss.settings": _settings(loss)}
    return recipe.override(changes), Components(data, embedder, loss)


def _describe_embedder(recipe: Recipe, embedder: Any) -> dict[str, Any]:
    """Return recipe keys that describe an embedder."""
    if not isinstance(embedder, Embedder):
        hint = ". Use Embedder.wrap." if isinstance(embedder, nn.Module) else ""
        raise UsageError(f"embedder must be an Embedder, got {format_value(embedder)}{hint}")
    bits = recipe.model.bits
    if bits not in (None, embedder.bits):
        raise UsageError(
            f"model.bits is {bits}, but the embedder has {embedder.bits or 'no'} bits. Use "
            f"Embedder.create(…, bits={bits})."
        )
    names = ("backbone", "pooling", "layer_norm", "normalize", "flip_tta", "tta_crops")
    keys = {f"model.{name}": getattr(embedder.architecture, name) for name in names}
    keys |= {"model.dim": embedder.dim, "model.weights": "custom", "model.bits": embedder.bits}
    keys["evaluation.similarity"] = embedder.architecture.similarity
    if (recipe.model.pca_dim or 0) >= embedder.dim:
        keys["model.pca_dim"] = None
    if embedder.takes_images:
        pixels = embedder.preprocessing
        keys["model.image_size"] = pixels.crop[0] if len({*pixels.crop}) == 1 else None
        keys |= {"model.resize": pixels.short_side, "model.squash": pixels.squash}
    if embedder.is_custom and recipe.training.cuda_graph == AUTO:
        keys["training.cuda_graph"] = False  # its forward pass may differ from call to call
    return keys


def find_custom(recipe: Recipe) -> str:
    """Return the first key of a recipe with a custom component and its value; "" without one."""
    keys = {
        "data.dataset": recipe.data.dataset,
        "model.backbone": recipe.model.backbone,
        "loss.name": recipe.loss.name,
    }
    custom = (f"{key} {name!r}" for key, name in keys.items() if name.startswith(CUSTOM))
    return next(custom, "")


def load_loss(config: LossConfig, num_classes: int, dim: int) -> nn.Module | None:
    """Return the loss ``module:Class`` of a recipe; None for a built-in loss.

    The module may be in the working folder.
    """
    if config.name.startswith(CUSTOM) or not CLASS_PATH.fullmatch(config.name):
        return None
    module, _, name = config.name.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:  # as with python -m
        sys.path.insert(0, os.getcwd())
    try:
        loss = getattr(import_module(module), name)
        if isinstance(loss, type):
            if not issubclass(loss, nn.Module):  # a recipe cannot call anything else
                raise TypeError(f"{name} is not a torch.nn.Module")
            sizes = {"num_classes": num_classes, "dim": dim}
            parameters = inspect.signature(loss).parameters
            sizes = {key: size for key, size in sizes.items() if key in parameters}
            loss = loss(**sizes | config.settings)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise RecipeError(f"loss.name {config.name}: {error}") from error
    return _as_module(loss)


class _Function(nn.Module):
    """A loss function as a module."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.function(embeddings, labels)


def _as_module(loss: Any) -> nn.Module:
    if isinstance(loss, type):
        raise UsageError(f"loss {loss.__name__} is a class. Write {loss.__name__}(…).")
    if isinstance(loss, nn.Module):
        return loss
    if not callable(loss):
        raise UsageError(
            f"loss must be callable as loss(embeddings, labels), got {format_value(loss)}"
        )
    name = getattr(loss, "__name__", type(loss).__name__)
    module: nn.Module = type(name, (_Function,), {})(loss)
    return module


def _settings(loss: nn.Module) -> dict[str, Any]:
    """Return the constructor arguments that are also attributes, if they are plain values."""
    names = inspect.signature(type(loss)).parameters
    values: dict[str, Any] = {name: getattr(loss, name, None) for name in names}
    # Numbers that a recipe can hold; not NaN.
    return {
        name: value
        for name, value in values.items()
        if type(value) in (bool, str) or (type(value) in (int, float) and abs(value) < 1e9)
    }
