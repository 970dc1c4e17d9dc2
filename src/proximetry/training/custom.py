"""Parts of one's own in place of those of the recipe: data, embedder, loss."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from proximetry import losses
from proximetry._util.errors import UsageError, shorten, shown
from proximetry._util.machine import preserve_rng_state
from proximetry.data import Catalog, VectorCatalog
from proximetry.models import Embedder
from proximetry.models.embedder import check_vectors
from proximetry.models.names import OWN, VECTOR_BACKBONES
from proximetry.recipe.loading import RecipeError
from proximetry.recipe.schema import AUTO, Recipe
from proximetry.training.sources.base import TrainingData
from proximetry.training.sources.torch_dataset import OwnDatasets, own_datasets


@dataclass(frozen=True)
class Parts:
    """What was given to `train` in place of parts of the recipe; None for what was not."""

    data: Catalog | OwnDatasets | None = None
    embedder: Embedder | None = None
    loss: nn.Module | None = None

    def make_embedder(self) -> Embedder | None:
        """A copy of the embedder: the one that was given stays as it is."""
        if self.embedder is None:
            return None
        made: Embedder = _copied("embedder", self.embedder)
        made.keep_frozen()
        return made

    def make_loss(self) -> nn.Module | None:
        """A copy of the loss."""
        return None if self.loss is None else _copied("loss", self.loss)


def _copied(what: str, module: Any) -> Any:
    try:
        return copy.deepcopy(module)
    except Exception as error:  # whatever the user's module trips over
        raise UsageError(
            f"the {what} is copied, so that yours stays as it is, and cannot be: {error}"
        ) from error


def take_parts(recipe: Recipe, data: Any, embedder: Any, loss: Any) -> tuple[Recipe, Parts]:
    """Check what was given; return the recipe with words for it, by which a run goes on."""
    changes: dict[str, Any] = {}
    if data is not None:
        if isinstance(data, str | PathLike):
            raise UsageError(
                f"data must be a Catalog or a dataset, got {shown(data)}; for a folder of images "
                "Catalog.from_folder makes one"
            )
        if not isinstance(data, Catalog):
            data = own_datasets(data)
        name = type(data).__name__ if isinstance(data, Catalog) else data.name
        changes |= {"data.dataset": f"{OWN}{name}", "data.root": None}
    if embedder is not None:
        changes |= _words_for_embedder(recipe, embedder)
    if loss is not None:
        loss = _as_module(loss)
        changes |= {"loss.name": f"{OWN}{type(loss).__name__}", "loss.settings": _settings(loss)}
    given = {"data": data, "embedder": embedder, "loss": loss}
    keys = {"data": "data.dataset", "embedder": "model.backbone", "loss": "loss.name"}
    named = (recipe.data.dataset, recipe.model.backbone, recipe.loss.name)
    for (part, key), name in zip(keys.items(), named, strict=True):
        if name.startswith(OWN) and given[part] is None:
            raise RecipeError(
                f"{key} {shown(name)} stands for one of your own: in Python, train({part}=…) "
                "takes it"
            )
    return (recipe.override(changes) if changes else recipe), Parts(data, embedder, loss)


def _words_for_embedder(recipe: Recipe, embedder: Any) -> dict[str, Any]:
    if not isinstance(embedder, Embedder):
        hint = "; Embedder.wrap makes one of it" if isinstance(embedder, nn.Module) else ""
        raise UsageError(f"embedder must be an Embedder, got {shown(embedder)}{hint}")
    made = embedder.architecture
    words: dict[str, Any] = {
        "model.backbone": made.backbone,
        "model.dim": embedder.dim,
        "model.pooling": made.pooling,
        "model.layer_norm": made.layer_norm,
        "model.normalize": made.normalize,
        "model.flip_tta": made.flip_tta,
        "model.tta_crops": made.tta_crops,
        "model.weights": "own",
        "evaluation.similarity": made.similarity,
    }
    asked = recipe.model.bits
    if asked not in (None, embedder.bits):
        raise UsageError(
            f"model.bits is {asked}, and the embedder was made for "
            f"{embedder.bits or 'no'} bits: Embedder.create(…, bits={asked})"
        )
    words["model.bits"] = embedder.bits
    if (recipe.model.pca_dim or 0) >= embedder.dim:
        words["model.pca_dim"] = None
    if embedder.takes_images:
        wanted = embedder.preprocessing
        words["model.image_size"] = wanted.crop[0] if len({*wanted.crop}) == 1 else None
        words |= {"model.resize": wanted.short_side, "model.squash": wanted.squash}
    if embedder.is_own and recipe.training.cuda_graph == AUTO:
        words["training.cuda_graph"] = False  # nobody knows what it does from call to call
    return words


class _Function(nn.Module):
    """A loss that is a plain function."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        return self.function(embeddings, labels)


def _as_module(loss: Any) -> nn.Module:
    if isinstance(loss, type):
        raise UsageError(f"loss {loss.__name__} is a class: write {loss.__name__}(…)")
    if isinstance(loss, nn.Module):
        return loss
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        made: nn.Module = type(name, (_Function,), {})(loss)
        return made
    raise UsageError(f"loss must be called as loss(embeddings, labels), got {shown(loss)}")


def _settings(loss: nn.Module) -> dict[str, Any]:
    """What its constructor was told, as far as it is plain and kept under the same name."""
    try:
        known = inspect.signature(type(loss)).parameters
    except ValueError:
        return {}
    kept = {name: getattr(loss, name, None) for name in known}
    return {name: value for name, value in kept.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if type(value) in (int, float):
        return bool(abs(value) < 1e9)  # which a recipe can hold, and not NaN
    return type(value) in (bool, str)


def check_vectors_fit(recipe: Recipe, catalog: Catalog | None) -> None:
    """Refuse vectors for a network of images, and images for one of vectors."""
    name = recipe.model.backbone
    if name.startswith(OWN):
        return
    if isinstance(catalog, VectorCatalog) and name not in VECTOR_BACKBONES:
        raise RecipeError(
            f"{catalog.root} holds vectors, and model.backbone {name} takes images; use the recipe "
            "vectors, or model.backbone vectors"
        )
    if not isinstance(catalog, VectorCatalog) and name in VECTOR_BACKBONES:
        raise RecipeError(
            f"model.backbone {name} takes vectors, and the data are images; give a .npz, .npy or "
            ".parquet file of vectors"
        )


def check_rows_fit(embedder: Embedder, catalog: Catalog) -> None:
    """Refuse images or vectors that an embedder of one's own does not take."""
    wanted = embedder.preprocessing
    if not isinstance(catalog, VectorCatalog):
        if not embedder.takes_images:
            raise UsageError(f"the embedder takes {wanted}, and the data are images")
        return
    if embedder.takes_images:
        raise UsageError("the embedder takes images, and the data are vectors")
    shape = tuple(catalog.vectors.shape[1:])
    if shape != getattr(wanted, "shape", ()):
        raise UsageError(f"the embedder takes {wanted}, and those of the data have {shape[0]}")


def check_network(embedder: Embedder, data: TrainingData) -> None:
    """Let a network of one's own, or one for tensors of one's own, embed a few rows."""
    if data.stage == "pixels" and embedder.takes_images:
        if not embedder.is_own:
            return
        blank = torch.zeros(2, 3, *embedder.preprocessing.crop, dtype=torch.uint8)
        batch = embedder.preprocessing.normalize(blank.to(data.world.device))
    else:
        rows = data.rows["train"][:2]
        batch = next(iter(data.views(rows, len(rows))))
    check_vectors(embedder.architecture.backbone.removeprefix(OWN), embedder, batch)


def check_loss(loss: nn.Module, class_names: Sequence[str], dim: int, batch_size: int) -> None:
    """Try a loss of one's own with made-up embeddings; refuse what could not be trained with."""
    name, classes = type(loss).__name__, len(class_names)
    if isinstance(loss, losses.ProxyLoss):
        known = loss.proxies.num_classes
        if (known, loss.proxies.dim) != (classes, dim):
            raise UsageError(
                f"loss {name} is for {known} classes and {loss.proxies.dim} dimensions, but there "
                f"are {classes} classes to train on and {dim} dimensions (held-out classes are not "
                "trained on; evaluation.protocol last holds none out)"
            )
    device = next((value.device for value in loss.parameters()), torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    # Pairs, from the last class on: a loss for fewer classes fails at once.
    labels = ((classes - 1 - torch.arange(max(4, min(batch_size, 32))) // 2) % classes).to(device)
    made_up = torch.randn(len(labels), dim, generator=random)
    embeddings = nn.functional.normalize(made_up).to(device).requires_grad_()
    tried = _copied("loss", loss)
    what = (
        f"loss {name}, given embeddings {list(embeddings.shape)} and labels of {classes} classes "
        f"(0 to {classes - 1})"
    )
    try:
        with preserve_rng_state():
            found = tried(embeddings, labels)
    except Exception as error:  # whatever the user's loss trips over
        reason = shorten(" ".join(str(error).split()), 300)
        raise UsageError(f"{what}, raises {type(error).__name__}: {reason}") from error
    if not isinstance(found, Tensor) or found.numel() != 1 or found.ndim > 0:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(f"{what}, gives {got}, not one number: reduce it to a scalar tensor")
    if not found.requires_grad:
        raise UsageError(f"{what}, gives a number without gradient: nothing would be learned")
    if not torch.isfinite(found):
        raise UsageError(f"{what}, gives {found.item()}")
    found.backward()  # type: ignore[no-untyped-call]
    if embeddings.grad is None:
        raise UsageError(f"{what}, does not depend on the embeddings: nothing would be learned")
