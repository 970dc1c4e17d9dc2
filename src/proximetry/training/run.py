"""`train`: a recipe and a folder in, results out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from proximetry.data import Catalog, VectorCatalog
from proximetry.kernels.cuda_graphs import ignore_stream_mismatch
from proximetry.kernels.layers import fuse
from proximetry.losses import parameter_groups
from proximetry.models import Embedder, freeze_batchnorm
from proximetry.models.backbones import check_patches, set_drop_path, takes_one_size
from proximetry.models.embedder import NoFeatureMapError
from proximetry.models.lora import add_lora
from proximetry.models.names import VECTOR_BACKBONES, Similarity
from proximetry.models.storage import SECOND_STAGE
from proximetry.recipe.auto import choose, device_facts
from proximetry.recipe.schema import ModelConfig, OptimizerConfig, Recipe, RecipeError
from proximetry.training.callbacks import Callback, check_callbacks
from proximetry.training.clock import Stopwatch
from proximetry.training.custom import (
    Parts,
    check_loss,
    check_network,
    check_rows_fit,
    check_vectors_fit,
    take_parts,
)
from proximetry.training.distributed import World, join_processes, process_group
from proximetry.training.evaluator import Evaluator
from proximetry.training.fingerprint import fingerprint, refuse_others
from proximetry.training.loop import Run, fit
from proximetry.training.objective import Objective
from proximetry.training.reporting import Display, Trackers
from proximetry.training.run_folder import (
    FIRST_STAGE,
    PlaceError,
    RunError,
    RunFolder,
    SavedRun,
)
from proximetry.training.schedule import LearningRates
from proximetry.training.sources.base import TrainingData, open_catalog
from proximetry.training.sources.images import ImageData
from proximetry.training.sources.torch_dataset import DatasetData, OwnDatasets
from proximetry.training.sources.vectors import CachedFeatures, VectorData
from proximetry.training.state import TrainState, link_checkpoints, restore_state
from proximetry.training.step import Updater
from proximetry.training.stopping import stop_requests


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    data: Catalog | Dataset[Any] | Mapping[str, Dataset[Any]] | None = None,
    embedder: Embedder | None = None,
    loss: nn.Module | Callable[[Tensor, Tensor], Tensor] | None = None,
    device: str | None = None,
    resume: bool = True,
    display: Display | None = None,
    callbacks: Sequence[Callback | Any] = (),
) -> dict[str, Any]:
    """Train a recipe, write everything to the folder ``out``, return the results.

    An interrupted run resumes from its last checkpoint; a complete one returns its results
    immediately. Under torchrun all processes call this alike; when one of them is lost, the others
    raise a `RankError`. All input is validated before the folder is written to, and torch's global
    state is restored at the end. Do not train in several threads of a process at a time.

    Args:
        recipe: what to do.
        out: folder of the run.
        data: in place of the recipe's: a `Catalog`; or a map-style torch Dataset that gives
            (image, label), an image being a PIL image or uint8 [H, W, 3], which are augmented and
            preprocessed like files, or a float tensor, which the network takes as it is; or a
            mapping of such datasets by "train", "val" and "test".
        embedder: in place of the recipe's model: any `Embedder`, as `Embedder.wrap` makes it of a
            network of your own. Yours stays as it is; the trained one is in ``out``.
        loss: in place of the recipe's: anything called as ``loss(embeddings, labels)`` that gives
            a scalar. Labels are 0…C−1 in the order of the names of the training classes. Its
            parameters learn at the proxies' rate. Yours stays as it is.
        device: cpu, cuda or cuda:1; None takes CUDA where there is a GPU.
        resume: whether to continue a run that is in the folder; else it is removed.
        display: shows progress.
        callbacks: called during the run; see `Callback`.
    """
    if not isinstance(recipe, Recipe):
        given = type(recipe).__name__
        raise TypeError(f"recipe must be a Recipe, as Recipe.load gives it, got {given}")
    callbacks = check_callbacks(callbacks)
    recipe, components = take_parts(recipe, data, embedder, loss)
    world = join_processes(device)
    shown = display if display is not None and world.leads else Display()
    context = RunContext(world, shown, callbacks, components, resume)
    with preserve_torch_state(world, out), shown:
        if recipe.training.two_stages:
            return _two_stages(recipe, Path(out), context)
        return _train_stage(recipe, RunFolder(Path(out)), context)


@dataclass(frozen=True)
class RunContext:
    """What a run gets besides its recipe and its folder."""

    world: World
    display: Display = field(default_factory=Display)
    callbacks: Sequence[Callback] = ()
    components: Parts = field(default_factory=Parts)
    resume: bool = True


def _train_stage(
    recipe: Recipe, folder: RunFolder, context: RunContext, second: RunFolder | None = None
) -> dict[str, Any]:
    """Train one recipe in one folder, from the start or from its last checkpoint.

    A first stage that starts over removes the run in the folder of the ``second`` stage.
    """
    display, first = context.display, context.world.first
    needs_graph = recipe.training.cuda_graph is True  # one that is "auto" may fail
    trackers = Trackers()
    with ExitStack() as stack:
        stack.callback(folder.release)
        if first(folder.lock.exists):  # an existing run: before hours of decoding
            first(lambda: folder.acquire(display.message))
        recipe, saved = first(lambda: resolve(recipe, folder, context.resume, second is not None))
        results = first(lambda: _complete_results(saved, recipe, context))
        if results is not None:
            return results
        first(lambda: Trackers.check(recipe))
        run = prepare(recipe, folder, context, needs_graph=needs_graph)
        stack.callback(run.data.close)
        run.callbacks = [trackers, display, *context.callbacks]
        if first(lambda: folder.acquire(display.message)):  # another may have begun a run by now
            _, saved = first(lambda: folder.resolve(run.recipe, context.resume))
        if saved is not None:
            _resume(run, saved)
        else:
            _begin(run, context, second)
        with trackers, stop_requests() as stop_requested:
            return fit(run, stop_requested)


def resolve(
    recipe: Recipe, folder: RunFolder, resume: bool, in_stages: bool
) -> tuple[Recipe, SavedRun | None]:
    """Resolve a recipe in a folder; the duration of a first stage is fixed."""
    recipe, saved = folder.resolve(recipe, resume)
    if saved is None or not in_stages:
        return recipe, saved
    before, now = saved.recipe.training, recipe.training
    if (before.epochs, before.stop_after) != (now.epochs, now.stop_after):
        raise RunError(
            f"the run in {folder.path.parent} is in two stages and cannot be extended: the second "
            "stage repeats what the first one found; choose another folder, or start over with "
            "--fresh"
        )
    return recipe, saved


def _complete_results(
    saved: SavedRun | None, recipe: Recipe, context: RunContext
) -> dict[str, Any] | None:
    """Return the results of a saved run if it is complete."""
    if saved is None or saved.results is None or not saved.is_complete(recipe):
        return None
    _check_images(saved, recipe, context)
    context.display.message(f"{saved.path} is complete already")
    if why := saved.results.get("stopped_early"):
        key = "epochs" if "run.finish" in why else "stop_after"
        context.display.message(f"{why}; a larger training.{key} resumes it")
    return saved.results


def _check_images(saved: SavedRun, recipe: Recipe, context: RunContext) -> None:
    """Reject images that a complete run was not trained on, if they can be opened."""
    catalog = context.components.data
    if catalog is None:
        looking = partial(context.display.progress, "looking for the images")
        with suppress(ValueError, OSError, ImportError):  # the results do not need them
            catalog = open_catalog(recipe, looking)
    if isinstance(catalog, Catalog):
        check_rows(saved, recipe, catalog)


def check_rows(saved: SavedRun, recipe: Recipe, catalog: Catalog) -> None:
    """Reject a catalog with other rows than the run was begun with."""
    if recipe.data.bad_images == "skip" or saved.checkpoint is None:
        return  # which images were skipped is not known before they are read
    before, now = saved.checkpoint["images"], fingerprint(catalog, None)
    if before["rows"] != now["rows"]:
        refuse_others(saved.path, before, now)


def _begin(run: Run, context: RunContext, second: RunFolder | None) -> None:
    """Begin a run, in place of the one in the folder."""
    folder, first, report = run.folder, run.world.first, run.report
    run.fresh = not context.resume
    if context.resume and first(folder.recipe.exists):
        report(f"no checkpoint in {folder.path} yet: beginning again")
    removed = "" if context.resume else first(lambda: _what_is_removed(folder, second))
    if removed:
        place = folder.path if second is None else folder.path.parent
        report(
            f"removing the {removed} run in {place}: embedder, results, checkpoints, report; "
            "with another folder for the new run it would be kept"
        )
    first(lambda: folder.begin(run.recipe, run.world.device))
    if second is not None:
        first(second.remove)


def _what_is_removed(folder: RunFolder, second: RunFolder | None) -> str:
    """Return "complete" or "unfinished" for the run that a fresh run replaces, "" for none."""
    if (second or folder).results.exists():
        return "complete"
    return "unfinished" if folder.last.exists() or (second and second.last.exists()) else ""


def _resume(run: Run, saved: SavedRun) -> None:
    """Restore the state of a saved run; only then write to its folder."""
    folder, state = run.folder, run.state
    restore_state(folder.last, run)
    run.world.first(lambda: folder.resume(run.recipe, state.lines))
    link_checkpoints(run)  # a kill may have prevented it
    if state.best_epoch is not None and not run.world.first(folder.best.exists):
        raise RunError(
            f"{folder.best}, the checkpoint of the selected epoch {state.best_epoch}, is gone. "
            "Put it back, or start over with --fresh."
        )
    before, now = saved.recipe.training.epochs, run.recipe.training.epochs
    if before != now:
        how = "extended" if now > before else "shortened"
        run.report(f"{how} from {before} to {now} epochs")
    run.report(f"continuing after step {state.step} (epoch {state.epoch})")


def prepare(
    recipe: Recipe, folder: RunFolder, context: RunContext, *, needs_graph: bool = False
) -> Run:
    """Build everything a run needs, which also validates the recipe; write nothing to the folder.

    Unless the run ``needs_graph``, it does without a CUDA graph that cannot be recorded.
    """
    clock = Stopwatch()
    world, report = context.world, context.display.message
    embedder, data = make_data(recipe, context)
    try:
        recipe, lines = choose_automatic(recipe, data)
        for line in lines:
            report(line)
        data = _open_cache(recipe, embedder, data, context.display)
        on_failure = None if needs_graph else report
        loss = context.components.make_loss()
        updater = make_updater(recipe, embedder, data, on_failure, loss)
        evaluated = embedder if updater.average is None else updater.average
        initial = [group["lr"] for group in updater.optimizer.param_groups]
        return Run(
            recipe=recipe,
            folder=folder,
            world=world,
            data=data,
            updater=updater,
            evaluator=Evaluator(recipe, evaluated, data, world, updater.graph, on_failure),
            rates=LearningRates(recipe.schedule, recipe.training.epochs, initial),
            clock=clock,
            state=TrainState(torch.zeros((), dtype=torch.float64, device=world.device)),
            report=report,
        )
    except BaseException:
        data.close()
        raise


def choose_automatic(recipe: Recipe, data: TrainingData) -> tuple[Recipe, list[str]]:
    """Choose the ``auto`` values of a recipe for device and data; return lines on that, too."""
    facts, images = device_facts(data.world), len(data.rows["train"])
    return choose(recipe, facts, images=images, storage=data.storage, kept=data.kept)


def _open_cache(
    recipe: Recipe, embedder: Embedder, data: TrainingData, display: Display
) -> TrainingData:
    """Open the cache of the data; a frozen backbone computes its features."""
    if not recipe.model.freeze_backbone:
        data.open_cache(recipe.data.cache)
        return data
    data.open_cache(recipe.data.cache)
    features = CachedFeatures(data, embedder, display)
    data.close()
    features.open_cache(recipe.data.cache)
    return features


def make_data(recipe: Recipe, context: RunContext) -> tuple[Embedder, TrainingData]:
    """Make the embedder and its training data, whose cache is not open yet."""
    world, display, parts = context.world, context.display, context.components
    own = parts.data
    if isinstance(own, OwnDatasets):
        catalog = own.catalog(display)
    else:
        looking = partial(display.progress, "looking for the images")
        catalog = own if own is not None else open_catalog(recipe, looking)
    check_vectors_fit(recipe, catalog)
    torch.manual_seed(recipe.training.seed)
    embedder = parts.make_embedder()
    if embedder is None:
        width = catalog.vectors.shape[1] if isinstance(catalog, VectorCatalog) else None
        embedder = make_embedder(
            recipe.model, recipe.evaluation.similarity, display.message, input_dim=width
        )
    else:
        _prepare(embedder, recipe.model, display.message)
    embedder.to(world.device)
    recipe = fit_crop_size(recipe, embedder, display.message)
    check_abilities(recipe, embedder)
    if not isinstance(own, OwnDatasets):
        check_rows_fit(embedder, catalog)
    if isinstance(own, OwnDatasets):
        data: TrainingData = DatasetData(recipe, own, catalog, embedder, world, display)
    elif isinstance(catalog, VectorCatalog):
        data = VectorData(recipe, catalog, world, display)
    else:
        data = ImageData(recipe, embedder.preprocessing, world, display, catalog)
    try:
        check_network(embedder, data)
        if parts.loss is not None:
            check_loss(parts.loss, data.class_names, embedder.dim, recipe.data.batch_size)
    except BaseException:
        data.close()
        raise
    return embedder, data


def make_updater(
    recipe: Recipe,
    embedder: Embedder,
    data: TrainingData,
    on_graph_failure: Callable[[str], None] | None,
    loss: nn.Module | None = None,
) -> Updater:
    """Make loss and optimizer, and prepare the network for its device."""
    world = data.world
    on_cuda = world.device.type == "cuda"
    if on_cuda:
        # No slower here, and the same in every run.
        torch.backends.cudnn.deterministic = True
        embedder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    alone = on_cuda and world.size == recipe.training.accumulate == 1
    graph = recipe.training.cuda_graph and alone
    if graph:
        fuse(embedder)
    objective = Objective(recipe.loss, data.class_names, embedder.dim, loss).to(world.device)
    optimizer = make_optimizer(recipe.optimizer, embedder, objective)
    return Updater(
        recipe,
        embedder,
        objective,
        optimizer,
        world,
        graph=graph,
        on_graph_failure=on_graph_failure,
        stage=data.stage,
    )


def make_embedder(
    m: ModelConfig,
    similarity: Similarity = "cosine",
    report: Callable[[str], None] = lambda line: None,
    input_dim: int | None = None,
) -> Embedder:
    """The network, with the statistics of batch normalisation frozen or not.

    A transformer pools its tokens itself, whatever a recipe says that was made for feature maps.
    One for vectors has no pooling, and takes those of ``input_dim`` dimensions.
    """
    of_training = {
        "pca_dim",
        "whitening",
        "dropout",
        "drop_path",
        "freeze_batchnorm",
        "freeze_backbone",
        "lora_rank",
        "lora_alpha",
    }
    given: dict[str, Any] = m.model_dump(exclude=of_training) | {"similarity": similarity}
    if m.backbone in VECTOR_BACKBONES:
        given |= {"input_dim": input_dim, "pooling": "auto"}
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always", UserWarning)
        try:
            embedder = Embedder.create(**given)
        except NoFeatureMapError as error:
            embedder = Embedder.create(**given | {"pooling": "auto"})
            pooling = embedder.architecture.pooling
            report(f"pooling {pooling} instead of {m.pooling}: {error}")
    for note in notes:
        report(str(note.message))
    if m.weights == "auto" and embedder.takes_images:
        report(f"weights: {embedder.weights.source}, {embedder.weights.origin}")
    _prepare(embedder, m, report)
    return embedder


def _prepare(embedder: Embedder, m: ModelConfig, report: Callable[[str], None]) -> None:
    """Make an embedder, also one of the user's, train as the recipe says."""
    if m.freeze_batchnorm:
        freeze_batchnorm(embedder)
    if m.lora_rank is not None and not embedder.is_own:  # which is refused later
        add_lora(embedder, m.lora_rank, m.lora_alpha)
    name = embedder.architecture.backbone
    if m.drop_path and not set_drop_path(embedder.backbone, name, m.drop_path):
        # Not refused: a recipe that has it may be meant for other networks.
        report(f"no stochastic depth: {name} has no blocks of timm that can be dropped")


def check_abilities(recipe: Recipe, embedder: Embedder) -> None:
    """Refuse what the recipe asks of the network and it cannot do, before images are decoded."""
    if recipe.model.lora_rank is not None and embedder.is_own:
        raise RecipeError("model.lora_rank is for networks of timm, not for one of your own")
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


def fit_crop_size(recipe: Recipe, embedder: Embedder, report: Callable[[str], None]) -> Recipe:
    """Return the recipe without its `data.crop_size` if the network takes images of one size."""
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
    o: OptimizerConfig, embedder: Embedder, objective: Objective
) -> torch.optim.Optimizer:
    """Make the optimizer with a learning rate for each part."""
    groups = parameter_groups(
        embedder,
        objective,
        lr=o.lr,
        head_lr_multiplier=o.head_multiplier,
        proxy_lr_multiplier=o.proxy_multiplier,
        layer_decay=o.layer_decay,
        require_proxies=False,
    )
    if objective.learns_as_proxies:
        groups = [part for group in groups for part in _at_proxies_rate(group, o, objective)]
    if not groups:
        raise RunError("nothing to train: the model has no parameters and the loss no proxies")
    # One launch for all parameters; on the CPU the plain form is kept.
    fused = True if all(p.is_cuda for group in groups for p in group["params"]) else None
    shared: Any = {"weight_decay": o.weight_decay, "fused": fused}
    if o.name == "sgd":
        return torch.optim.SGD(groups, momentum=o.momentum, **shared)
    kind = torch.optim.AdamW if o.name == "adamw" else torch.optim.Adam
    return kind(groups, eps=o.eps, **shared)


def _at_proxies_rate(
    group: dict[str, Any], o: OptimizerConfig, objective: Objective
) -> Iterator[dict[str, Any]]:
    """Let parameters of a loss of one's own learn at the proxies' rate."""
    own = {*objective.loss.parameters()} if group["name"] == "loss" else set()
    rates = (False, group["lr"]), (True, o.lr * o.proxy_multiplier)
    for wanted, lr in rates:
        members = [value for value in group["params"] if (value in own) == wanted]
        if members:
            yield {**group, "params": members, "lr": lr}


def first_stage(recipe: Recipe) -> Recipe:
    """The recipe that finds the epochs and the drops of ``training.two_stages``."""
    return recipe.override(
        {
            "name": f"{recipe.name}, first stage",
            "schedule.name": "plateau",
            "training.two_stages": False,
            "evaluation": {"protocol": "held_out", "held_out": 0.5},
        }
    )


def check_place_of_stages(out: Path) -> None:
    """Refuse a folder with something else in it, which later commands would take for the run."""
    if RunFolder(out).holds_run():
        raise PlaceError(f"{out} holds a run that is not in two stages; choose another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / FIRST_STAGE).is_dir():
        raise PlaceError(f"{out} is not empty and holds no run; choose another folder")


def _two_stages(recipe: Recipe, out: Path, context: RunContext) -> dict[str, Any]:
    """Find the epochs and the learning-rate drops, then use every class (Teh et al. 2020).

    The first stage trains on half of the training classes, drops the rates on plateaus of the
    other half, and notes the drops and the best epoch. The second trains on all training classes
    for as many epochs with the same drops.
    """
    check_place_of_stages(out)
    first, second = RunFolder(out / FIRST_STAGE), RunFolder(out / SECOND_STAGE)
    found = _train_stage(first_stage(recipe), first, context, second)
    epochs = found["selected"]["epoch"]
    drops = [drop for drop in found["drops"] if drop < epochs]
    recipe = recipe.override(
        {
            "name": f"{recipe.name}, second stage",
            "schedule": {"name": "milestones", "at": drops},
            "training": {"two_stages": False, "epochs": epochs, "stop_after": 0},
            "evaluation.protocol": "last",
        }
    )
    context.display.message(f"second stage: {epochs} epochs, learning-rate drops after {drops}")
    results = _train_stage(recipe, second, context)
    return {**results, "protocol": "held_out", "first_stage": found["selected"]}


@contextmanager
def preserve_torch_state(world: World, out: str | Path) -> Iterator[None]:
    """Restore torch's global state and leave the process group at the end.

    Running out of memory and losing a rank become clear errors.
    """
    try:
        with _torch_state_restored(world.device), process_group(world):
            yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"not enough memory on {world.device} for the run in {out}; a smaller "
            "data.batch_size, training.accumulate 2 or more (the batch in chunks), "
            "training.precision bfloat16 or data.cache pixels needs less, or wait until others "
            f"have left the device ({str(error).split('. ')[0]})"
        ) from error


@contextmanager
def _torch_state_restored(device: torch.device) -> Iterator[None]:
    """Leave random state, cuDNN's flags, warnings, threads and the current GPU as they were."""
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    threads = torch.get_num_threads()
    every_gpu = range(torch.cuda.device_count())  # a seed is set on all of them
    current = device if device.type == "cuda" else -1  # Triton launches on it; -1 is no change
    try:
        with (
            torch.random.fork_rng(every_gpu),
            torch.cuda.device(current),
            ignore_stream_mismatch(),
        ):
            yield
    finally:
        cudnn.deterministic, cudnn.benchmark = flags
        torch.set_num_threads(threads)
