"""`train`: a recipe and a folder in, results out."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from proximetry.cuda.fused import fuse
from proximetry.cuda.graphs import ignore_stream_mismatch
from proximetry.data import Catalog, VectorCatalog
from proximetry.losses import parameter_groups
from proximetry.models import Embedder, freeze_batchnorm
from proximetry.models.backbones import check_patches, set_drop_path, takes_one_size
from proximetry.models.embedder import NoFeatureMapError, Stage
from proximetry.models.lora import add_lora
from proximetry.models.names import VECTOR_BACKBONES, Similarity
from proximetry.models.storage import SECOND_STAGE
from proximetry.training.automatic import choose, device_facts
from proximetry.training.callbacks import Callback, check_callbacks
from proximetry.training.clock import Stopwatch
from proximetry.training.data import TrainingData, open_catalog
from proximetry.training.datasets import DatasetData, OwnDatasets
from proximetry.training.distributed import World, join_processes, process_group
from proximetry.training.evaluator import Evaluator
from proximetry.training.fingerprint import fingerprint, refuse_others
from proximetry.training.images import ImageData
from proximetry.training.loop import Run, fit
from proximetry.training.objective import Objective
from proximetry.training.parts import (
    Parts,
    check_loss,
    check_network,
    check_rows_fit,
    check_vectors_fit,
    take_parts,
)
from proximetry.training.recipe import ModelConfig, OptimizerConfig, Recipe, RecipeError
from proximetry.training.reporting import Display, Trackers
from proximetry.training.run_folder import (
    FIRST_STAGE,
    Continuation,
    PlaceError,
    RunError,
    RunFolder,
)
from proximetry.training.schedule import LearningRates
from proximetry.training.state import Checkpoints, TrainState, find_best, restore_state, save_state
from proximetry.training.stopping import stop_requests
from proximetry.training.update import Updater
from proximetry.training.vectors import CachedFeatures, VectorData


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
    """Train as the recipe says, write everything to the folder ``out``, return the results.

    A run that was cut off continues where its last checkpoint stands; one that is complete
    returns its results at once. Under torchrun all processes call this alike; when one of them is
    lost, the others raise a `RankError`. Everything is checked before the folder is touched, and
    torch's global state is afterwards as it was before. Threads take turns.

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
        callbacks: called while the run goes on; see `Callback`.
    """
    if not isinstance(recipe, Recipe):
        given = type(recipe).__name__
        raise TypeError(f"recipe must be a Recipe, as Recipe.load gives it, got {given}")
    callbacks = check_callbacks(callbacks)
    recipe, parts = take_parts(recipe, data, embedder, loss)
    world = join_processes(device)
    shown = display if display is not None and world.leads else Display()
    stage = partial(_train_stage, world, resume, shown, callbacks, parts)
    with guest_of_torch(world, out, shown.message), shown:
        if recipe.training.two_stages:
            return _two_stages(recipe, Path(out), stage, shown)
        return stage(recipe, RunFolder(Path(out)))


def _train_stage(
    world: World,
    resume: bool,
    display: Display,
    callbacks: Sequence[Callback],
    parts: Parts,
    recipe: Recipe,
    folder: RunFolder,
    outdates: RunFolder | None = None,
) -> dict[str, Any]:
    """Train one recipe in one folder, from the start or from its last checkpoint.

    A run that is begun anew ``outdates`` the one that goes by its results, which is removed.
    """
    try:
        # Where there is a run, at once: nobody should decode for hours to be refused then.
        if world.first(folder.lock.exists):
            world.first(lambda: folder.acquire(display.message))
        return _train_alone(world, resume, display, callbacks, parts, recipe, folder, outdates)
    finally:
        folder.release()


def _train_alone(
    world: World,
    resume: bool,
    display: Display,
    callbacks: Sequence[Callback],
    parts: Parts,
    recipe: Recipe,
    folder: RunFolder,
    outdates: RunFolder | None,
) -> dict[str, Any]:
    asked = recipe
    recipe = world.first(lambda: folder.keep_choices(asked, resume))
    begun = world.first(lambda: folder.check(recipe, resume))
    check_end(begun, recipe, folder, in_stages=outdates is not None)
    if begun is not None and world.first(lambda: folder.is_complete(recipe, display.message)):
        world.first(lambda: _check_images(folder, recipe, parts, display))
        results = folder.read_results()
        display.message(f"{folder.path} is complete already")
        if why := results.get("stopped_early"):
            key = "epochs" if "run.finish" in why else "stop_after"
            display.message(f"{why}; a larger training.{key} resumes it")
        return results
    world.first(lambda: Trackers.check(recipe))
    # A graph that was not asked for by name may also fail.
    needs_graph = asked.training.cuda_graph is True
    run = prepare(recipe, folder, world, display, parts, needs_graph=needs_graph)
    try:
        return _go(run, world, resume, display, callbacks, folder, outdates)
    finally:
        run.data.close()


def _check_images(folder: RunFolder, recipe: Recipe, parts: Parts, display: Display) -> None:
    """Refuse other images than those a complete run was trained on, as far as they are at hand."""
    catalog = parts.data
    if catalog is None:
        # They may be gone by now, or what reads them; the results do not need them.
        with suppress(ValueError, OSError, ImportError):
            catalog = open_catalog(recipe, partial(display.progress, "looking for the images"))
    if isinstance(catalog, Catalog):
        check_rows(folder, recipe, catalog)


def check_rows(folder: RunFolder, recipe: Recipe, catalog: Catalog) -> None:
    """Refuse a catalogue with other rows than the run was begun with."""
    if recipe.data.bad_images == "skip":
        return  # which of them were left out is not known before they are read
    try:
        before = folder.newest().images
    except RunError:
        return  # results and embedder are there without a checkpoint
    now = fingerprint(catalog, None)
    if before["rows"] != now["rows"]:
        refuse_others(folder.path, before, now)


def _go(
    run: Run,
    world: World,
    resume: bool,
    display: Display,
    callbacks: Sequence[Callback],
    folder: RunFolder,
    outdates: RunFolder | None,
) -> dict[str, Any]:
    """Begin a run or continue it, and train to its end."""
    run.fresh = not resume
    trackers = Trackers()
    run.callbacks = [Checkpoints(), trackers, display, *callbacks]
    world.first(lambda: folder.acquire(display.message))
    begun = world.first(lambda: folder.check(run.recipe, resume))  # another may have begun by now
    if begun is not None:
        _continue(run, begun, world.first(folder.newest), display)
    else:
        if resume and world.first(folder.recipe.exists):
            display.message(f"no checkpoint in {folder.path} yet: beginning again")
        found = None if resume else world.first(lambda: _what_is_removed(folder, outdates))
        if found:
            place = folder.path if outdates is None else folder.path.parent
            display.message(
                f"removing the {found} run in {place}: embedder, results, checkpoints, report; "
                "with another folder for the new run it would be kept"
            )
        world.first(lambda: folder.begin(run.recipe, world.device))
        if outdates is not None:
            world.first(outdates.remove)
    with trackers, stop_requests() as stop_requested:
        return fit(run, stop_requested)


def _what_is_removed(folder: RunFolder, outdates: RunFolder | None) -> str:
    """What a fresh run takes the place of, in a word; nothing is lost without a checkpoint."""
    if (outdates or folder).results.exists():
        return "complete"
    return "unfinished" if folder.last.exists() or (outdates and outdates.last.exists()) else ""


def _continue(run: Run, begun: Recipe, found: Continuation, display: Display) -> None:
    """Put a run back to where a checkpoint stands; only then write to its folder."""
    for problem in found.problems:
        display.message(problem)
    restore_state(found.path, run)
    run.world.first(lambda: run.folder.go_on(run.recipe, run.state.lines, display.message))
    before, now = begun.training.epochs, run.recipe.training.epochs
    if before != now:
        how = "extended" if now > before else "shortened"
        display.message(f"{how} from {before} to {now} epochs")
    which = ""
    if found.path != run.folder.last:
        which = f" from {found.path.name}"
        save_state(run.folder.last, run)
    at_the_best = (run.state.best_epoch, 0) == (run.state.epoch, run.state.batch)
    if at_the_best and run.world.first(lambda: find_best(run))[0] is None:
        save_state(run.folder.best, run)
    display.message(f"continuing{which} after step {run.state.step} (epoch {run.state.epoch})")


def check_end(begun: Recipe | None, recipe: Recipe, folder: RunFolder, in_stages: bool) -> None:
    """Refuse to move the end of a first stage, from which everything about the second follows."""
    if begun is None or not in_stages:
        return
    before, now = begun.training, recipe.training
    if (before.epochs, before.stop_after) != (now.epochs, now.stop_after):
        raise RunError(
            f"the run in {folder.path.parent} is in two stages and cannot be extended: the second "
            "stage repeats what the first one found; choose another folder, or start over with "
            "--fresh"
        )


def prepare(
    recipe: Recipe,
    folder: RunFolder,
    world: World,
    display: Display,
    parts: Parts = Parts(),  # noqa: B008
    *,
    needs_graph: bool = False,
) -> Run:
    """Build everything a run needs, which also checks the recipe; writes nothing to the folder.

    Unless the run ``needs_graph``, a CUDA graph that cannot be recorded is done without.
    """
    clock = Stopwatch()
    embedder, data = make_data(recipe, world, display, parts)
    try:
        recipe, data = _place(recipe, embedder, data, display)
        return _make_run(recipe, folder, embedder, data, display, parts, clock, needs_graph)
    except BaseException:
        data.close()
        raise


def _place(
    recipe: Recipe, embedder: Embedder, data: TrainingData, display: Display
) -> tuple[Recipe, TrainingData]:
    """Choose what is automatic, and bring the data to where they are read from."""
    facts, images = device_facts(data.world), len(data.rows["train"])
    recipe, lines = choose(recipe, facts, images=images, storage=data.storage, kept=data.kept)
    for line in lines:
        display.message(line)
    if not recipe.model.freeze_backbone:
        data.put(recipe.data.cache)
        return recipe, data
    # Features are those of the files themselves, whatever is kept of these.
    data.put("none" if recipe.data.cache == "encoded" else recipe.data.cache)
    features = CachedFeatures(data, embedder, display)
    data.close()
    features.put(recipe.data.cache)
    return recipe, features


def _make_run(
    recipe: Recipe,
    folder: RunFolder,
    embedder: Embedder,
    data: TrainingData,
    display: Display,
    parts: Parts,
    clock: Stopwatch,
    needs_graph: bool,
) -> Run:
    world, on_failure = data.world, None if needs_graph else display.message
    updater = make_updater(
        recipe, embedder, data.class_names, world, on_failure, parts.make_loss(), data.stage
    )
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
        report=display.message,
    )


def make_data(
    recipe: Recipe, world: World, display: Display, parts: Parts
) -> tuple[Embedder, TrainingData]:
    """The embedder, and what it is trained on."""
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
    class_names: Sequence[str],
    world: World,
    on_graph_failure: Callable[[str], None] | None,
    loss: nn.Module | None = None,
    stage: Stage = "pixels",
) -> Updater:
    """Loss, optimiser and how the network runs on its device."""
    on_cuda = world.device.type == "cuda"
    if on_cuda:
        # No slower here, and the same in every run.
        torch.backends.cudnn.deterministic = True
        embedder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    alone = on_cuda and world.size == recipe.training.accumulate == 1
    graph = recipe.training.cuda_graph and alone
    if graph:
        fuse(embedder)
    objective = Objective(recipe.loss, class_names, embedder.dim, loss).to(world.device)
    optimizer = make_optimizer(recipe.optimizer, embedder, objective)
    return Updater(recipe, embedder, objective, optimizer, world, graph, on_graph_failure, stage)


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
    """The optimiser with a learning rate for each part."""
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
    if RunFolder(out).is_ours():
        raise PlaceError(f"{out} holds a run that is not in two stages; choose another folder")
    if out.is_dir() and any(out.iterdir()) and not (out / FIRST_STAGE).is_dir():
        raise PlaceError(f"{out} is not empty and holds no run; choose another folder")


def _two_stages(
    recipe: Recipe, out: Path, stage: Callable[..., dict[str, Any]], display: Display
) -> dict[str, Any]:
    """Find the epochs and the learning-rate drops, then use every class (Teh et al. 2020).

    The first stage trains on half of the training classes, drops the rates on plateaus of the
    other half, and notes the drops and the best epoch. The second trains on all training classes
    for as many epochs with the same drops.
    """
    check_place_of_stages(out)
    folders = RunFolder(out / FIRST_STAGE), RunFolder(out / SECOND_STAGE)
    found = stage(first_stage(recipe), *folders)
    epochs = found["selected"]["epoch"]
    drops = [drop for drop in found["drops"] if drop < epochs]
    second = recipe.override(
        {
            "name": f"{recipe.name}, second stage",
            "schedule": {"name": "milestones", "at": drops},
            "training": {"two_stages": False, "epochs": epochs, "stop_after": 0},
            "evaluation.protocol": "last",
        }
    )
    display.message(f"second stage: {epochs} epochs, learning-rate drops after {drops}")
    results = stage(second, folders[1])
    return {**results, "protocol": "held_out", "first_stage": found["selected"]}


# A callback may train too, hence the R.
_TURN = threading.RLock()


@contextmanager
def guest_of_torch(
    world: World,
    out: str | Path,
    report: Callable[[str], None] = lambda line: None,
) -> Iterator[None]:
    """Restore torch's global state and leave the process group at the end.

    Running out of memory and losing a rank become clear errors. Torch has one random state for all
    threads: they train one after the other.
    """
    if not _TURN.acquire(blocking=False):
        report("waiting for another training in this process to end")
        _TURN.acquire()
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
    finally:
        _TURN.release()


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
