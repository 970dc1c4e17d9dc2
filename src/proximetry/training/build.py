"""`build`: construct a `Run` from its recipe."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from proximetry._util.errors import UsageError
from proximetry.data import VectorCatalog
from proximetry.kernels.layers import fuse
from proximetry.losses import parameter_groups
from proximetry.models import Embedder, freeze_batchnorm
from proximetry.models.backbones import (
    NoFeatureMapError,
    check_patches,
    set_drop_path,
    takes_one_size,
)
from proximetry.models.constants import CUSTOM, VECTOR_BACKBONES, Similarity
from proximetry.models.lora import add_lora
from proximetry.recipe.auto import choose
from proximetry.recipe.loading import RecipeError
from proximetry.recipe.schema import EMA, ModelConfig, OptimizerConfig, Recipe
from proximetry.training.custom_components import Components, load_loss
from proximetry.training.distributed import World, device_facts
from proximetry.training.errors import RunError
from proximetry.training.evaluator import Evaluator, check_input
from proximetry.training.reporting import Display
from proximetry.training.run import Run, Stopwatch, TrainState
from proximetry.training.run_folder import RunFolder
from proximetry.training.schedule import LearningRates
from proximetry.training.sources.image_data import ImageData
from proximetry.training.sources.torch_dataset import TorchDatasetData, TorchDatasets
from proximetry.training.sources.training_data import TrainingData, open_catalog
from proximetry.training.sources.vector_data import CachedFeatures, VectorData
from proximetry.training.trackers import check_tracker
from proximetry.training.updater import Objective, Updater

Report = Callable[[str], None]

# Keys of `model` that are not arguments of `Embedder.create`.
_TRAINING_KEYS = {
    "pca_dim",
    "whitening",
    "dropout",
    "drop_path",
    "freeze_batchnorm",
    "freeze_backbone",
    "lora_rank",
    "lora_alpha",
}


@dataclass(frozen=True)
class RunContext:
    """Processes, display, callbacks and custom components of a run."""

    world: World
    display: Display = field(default_factory=Display)
    callbacks: Sequence[Any] = ()
    components: Components = field(default_factory=Components)
    resume: bool = True


def build(
    recipe: Recipe, folder: RunFolder, context: RunContext, *, open_cache: bool = True
) -> Run:
    """Build all parts of a run and validate the recipe; write nothing to the folder.

    `RunFolder.resolve` has already replaced ``auto`` by the values of a saved run. The data gets a
    copy of the recipe from `fit_crop_size` and reads no ``auto`` key; `choose` replaces the other
    ``auto`` values for the run. With ``open_cache=False`` no image is decoded and `batches` cannot
    be called.
    """
    clock, world, report = Stopwatch(), context.world, context.display.message
    check_tracker(recipe)
    # `true` raises if the graph cannot be recorded; "auto" reports it and runs without.
    on_graph_failure = None if recipe.training.cuda_graph is True else report
    embedder, data = make_data(recipe, context)
    images = len(data.rows["train"])
    storage = world.on_main(lambda: data.storage)
    recipe, choices = choose(
        recipe, device_facts(world), images=images, storage=storage, origin=data.origin
    )
    for line in choices:
        report(line)
    if open_cache:
        data.open_cache(recipe.data.cache)
        if recipe.model.freeze_backbone:
            data = CachedFeatures(data, embedder, context.display)
            data.open_cache(recipe.data.cache)
    elif recipe.model.freeze_backbone:
        data.stage = "features"
    with_images = {*data.class_names}
    data.class_names += [name for name in context.components.classes if name not in with_images]
    on_cuda = world.device.type == "cuda"
    if on_cuda:  # deterministic kernels are as fast for these networks
        torch.backends.cudnn.deterministic = True
        embedder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    graph = bool(recipe.training.cuda_graph) and on_cuda
    graph = graph and world.size == recipe.training.accumulate == 1
    if graph:
        fuse(embedder)
    loss = copy.deepcopy(context.components.loss)
    if loss is None:
        loss = load_loss(recipe.loss, len(data.class_names), embedder.dim)
    objective = Objective(recipe.loss, data.class_names, embedder.dim, loss, data.class_counts).to(
        world.device
    )
    updater = Updater(
        recipe,
        embedder,
        objective,
        make_optimizer(recipe.optimizer, embedder, objective),
        world,
        graph=graph,
        on_graph_failure=on_graph_failure,
        stage=data.stage,
        teacher=load_teacher(recipe, embedder, data, world),
    )
    evaluated_embedder = embedder if updater.average is None else updater.average
    steps_per_epoch = len(data.sampler)
    epochs = math.ceil(recipe.training.total_steps(steps_per_epoch) / steps_per_epoch)
    initial = [group["lr"] for group in updater.optimizer.param_groups]
    return Run(
        recipe=recipe,
        folder=folder,
        world=world,
        data=data,
        updater=updater,
        evaluator=Evaluator(recipe, evaluated_embedder, data, graph, on_graph_failure),
        rates=LearningRates(recipe.schedule, epochs, initial),
        clock=clock,
        state=TrainState(
            loss_sum=torch.zeros((), dtype=torch.float64, device=world.device),
            bad_step=torch.full((), -1, dtype=torch.long, device=world.device),
        ),
        report=report,
        choices=choices,
    )


def load_teacher(
    recipe: Recipe, embedder: Embedder, data: TrainingData, world: World
) -> Embedder | None:
    """Load the teacher of ``loss.relational``; None if there is none, or for a moving average."""
    if not recipe.loss.relational or recipe.loss.teacher == EMA:
        return None
    teacher, name = Embedder.load(recipe.loss.teacher, world.device), recipe.loss.teacher
    teacher.requires_grad_(False)
    if world.device.type == "cuda":
        teacher.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    before, now = teacher.preprocessing, embedder.preprocessing
    resizes = data.stage == "pixels" and embedder.takes_images and teacher.takes_images
    if data.stage != "features" and before != now and not resizes:
        raise RecipeError(f"loss.teacher {name} takes {before}, but the run takes {now}")
    if data.stage == "features":  # computed by the backbone of the run
        states = (one.backbone.state_dict() for one in (teacher, embedder))
        ours, theirs = ({name: value.cpu() for name, value in state.items()} for state in states)
        if ours.keys() != theirs.keys() or any(not torch.equal(ours[n], theirs[n]) for n in ours):
            raise RecipeError(
                f"loss.teacher {name} has another backbone than the run, which is frozen. Set "
                "--model.freeze-backbone no."
            )
    return teacher


def make_data(recipe: Recipe, context: RunContext) -> tuple[Embedder, TrainingData]:
    """Make the embedder and its training data, without opening the cache."""
    world, display, components = context.world, context.display, context.components
    source = components.data
    for argument, key, name in (
        ("embedder", "model.backbone", recipe.model.backbone),
        ("loss", "loss.name", recipe.loss.name),
    ):
        if name.startswith(CUSTOM) and getattr(components, argument) is None:
            raise RecipeError(f"{key} {name!r} is custom. Pass it in Python: train({argument}=…)")
    if isinstance(source, TorchDatasets):
        catalog = source.catalog(display)
    elif source is not None:
        catalog = source
    else:
        catalog = open_catalog(recipe, partial(display.progress, "scanning images"))
    torch.manual_seed(recipe.training.seed)
    embedder = copy.deepcopy(components.embedder)
    if embedder is None:
        width = catalog.vectors.shape[1] if isinstance(catalog, VectorCatalog) else None
        if (width is not None) != (recipe.model.backbone in VECTOR_BACKBONES):
            accepts, content = ("vectors", "images") if width is None else ("images", "vectors")
            raise RecipeError(
                f"{catalog.root} contains {content}, but model.backbone {recipe.model.backbone} "
                f"takes {accepts}. Use another model.backbone: `vectors` takes vectors."
            )
        embedder = make_embedder(
            recipe.model, recipe.evaluation.similarity, display.message, input_dim=width
        )
    else:
        if not isinstance(source, TorchDatasets):
            check_input(embedder, catalog)
        embedder.keep_frozen()
        _apply_training_keys(embedder, recipe.model, display.message)
    embedder.to(world.device)
    data_recipe = fit_crop_size(recipe, embedder, display.message)
    check_network(data_recipe, embedder)
    if isinstance(source, TorchDatasets):
        data = TorchDatasetData(data_recipe, source, catalog, embedder, world, display=display)
        return embedder, data
    if isinstance(catalog, VectorCatalog):
        if embedder.takes_images:
            raise UsageError(f"the embedder takes images, but {catalog.root} contains vectors")
        return embedder, VectorData(data_recipe, catalog, world, display)
    return embedder, ImageData(data_recipe, embedder.preprocessing, world, display, catalog)


def make_embedder(
    config: ModelConfig,
    similarity: Similarity = "cosine",
    report: Report = lambda line: None,
    input_dim: int | None = None,
) -> Embedder:
    """Make the embedder of a recipe.

    Transformers pool their tokens and ignore `model.pooling`. Backbones for vectors need
    ``input_dim`` and have no pooling.
    """
    options: dict[str, Any] = config.model_dump(exclude=_TRAINING_KEYS) | {"similarity": similarity}
    if config.backbone in VECTOR_BACKBONES:
        options |= {"input_dim": input_dim, "pooling": "auto"}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        try:
            embedder = Embedder.create(**options)
        except NoFeatureMapError as error:
            embedder = Embedder.create(**options | {"pooling": "auto"})
            report(f"pooling {embedder.architecture.pooling} instead of {config.pooling}: {error}")
    for note in notes:
        report(str(note.message))
    if config.weights == "auto" and embedder.takes_images:
        report(f"weights: {embedder.weights.source}, {embedder.weights.origin}")
    _apply_training_keys(embedder, config, report)
    return embedder


def _apply_training_keys(embedder: Embedder, config: ModelConfig, report: Report) -> None:
    """Freeze batch norm, and add LoRA and stochastic depth, as in the recipe."""
    if config.freeze_batchnorm:
        freeze_batchnorm(embedder)
    if config.lora_rank and not embedder.is_custom:  # `check_network` rejects custom networks
        add_lora(embedder, config.lora_rank, config.lora_alpha)
    name = embedder.architecture.backbone
    if config.drop_path and not set_drop_path(embedder.backbone, name, config.drop_path):
        # No error: the recipe may be for other networks.
        report(f"no stochastic depth: {name} has no timm blocks")


def check_network(recipe: Recipe, embedder: Embedder) -> None:
    """Reject keys that the network does not support, before images are decoded."""
    if recipe.model.lora_rank is not None and embedder.is_custom:
        raise RecipeError("model.lora_rank needs a timm network, not a custom one")
    if recipe.model.freeze_backbone and not embedder.parameter_parts()["head"]:
        raise RunError("model.freeze_backbone leaves nothing to train: there is no head")
    if recipe.optimizer.layer_decay != 1.0:
        try:
            embedder.backbone_layers()
        except ValueError as error:
            raise RecipeError(f"optimizer.layer_decay must be 1: {error}") from error
    if not embedder.takes_images:
        return
    side, network = recipe.data.crop_size, embedder.architecture.backbone
    if side is not None and (side, side) != embedder.preprocessing.crop:
        check_patches(embedder.backbone, network, (side, side), "data.crop_size")


def fit_crop_size(recipe: Recipe, embedder: Embedder, report: Report = lambda line: None) -> Recipe:
    """Return the recipe for the data, without `data.crop_size` if the network takes one size only.

    The recipe of the run keeps the key, so that the same recipe resumes the run.
    """
    side, size = recipe.data.crop_size, embedder.preprocessing.crop if embedder.takes_images else ()
    flattened = embedder.architecture.pooling == "flatten"
    if side is None or (side, side) == size or not size:
        return recipe
    if not flattened and not takes_one_size(embedder.backbone):
        return recipe
    what = "model.pooling flatten" if flattened else embedder.architecture.backbone
    report(f"training crops of {size[0]}×{size[1]} instead of {side}: {what} takes one size")
    return recipe.override({"data.crop_size": None})


def make_optimizer(
    config: OptimizerConfig, embedder: Embedder, objective: Objective
) -> torch.optim.Optimizer:
    """Make the optimizer with a learning rate for each part."""
    groups = parameter_groups(
        embedder,
        objective,
        lr=config.lr,
        head_lr_multiplier=config.head_multiplier,
        proxy_lr_multiplier=config.proxy_multiplier,
        layer_decay=config.layer_decay,
        require_proxies=False,
    )
    for group in groups:
        if group["name"] == "loss" and objective.uses_proxy_lr:
            group["lr"] = config.lr * config.proxy_multiplier
    if not groups:
        raise RunError("nothing to train: the model has no parameters and the loss no proxies")
    # One launch for all parameters on a GPU; the default on the CPU.
    fused = True if all(p.is_cuda for group in groups for p in group["params"]) else None
    shared: Any = {"weight_decay": config.weight_decay, "fused": fused}
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, **shared)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(groups, eps=config.eps, **shared)
