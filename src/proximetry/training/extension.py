"""`extend`: add classes to a trained run."""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_path, atomic_write
from proximetry._util.formatting import join_first
from proximetry.data import Catalog, VectorCatalog, open_dataset
from proximetry.data.datasets import resolve_source
from proximetry.losses import Proxies
from proximetry.models import Embedder
from proximetry.recipe.auto import MIN_STEPS
from proximetry.recipe.schema import AUTO, EMA, Recipe
from proximetry.training.build import RunContext
from proximetry.training.callbacks import Callback, check_callbacks
from proximetry.training.checkpoint import read_part, restore_state, save_state
from proximetry.training.custom_components import Components, find_custom
from proximetry.training.distributed import join_processes, preserve_torch_state
from proximetry.training.evaluation_inputs import drop_unused_roles, explain_missing_positives
from proximetry.training.evaluator import encode_catalog, score_queries
from proximetry.training.metrics_table import metrics_table
from proximetry.training.reporting import Display
from proximetry.training.run_folder import (
    IMAGES_TABLE,
    VECTORS_FILE,
    RunFolder,
    check_out,
    final_stage,
)
from proximetry.training.sources.training_data import derive_seed, open_catalog
from proximetry.training.trainer import train_run

if TYPE_CHECKING:
    from proximetry.training.run import Run

LR_SHARE = 0.25
"""Learning rate of the backbone in an extended run, as a fraction of that of the original run."""
MIN_EPOCHS = 3
TEACHER_WEIGHT = 10.0
"""Weight of `loss.relational` in a run that is extended without the old images."""
EXTENDED = ", extended"
"""Suffix of the name of an extended run."""


@dataclass(frozen=True)
class Start(Callback):
    """Starts a run from the weights and the proxies of another run; saves a checkpoint.

    Proxies of new classes start at the mean embeddings of their images.

    Attributes:
        proxies: those of the other run.
        embedder: its weights, before any PCA.
        loss: the rest of the state of its loss.
    """

    proxies: Proxies
    embedder: Mapping[str, torch.Tensor]
    loss: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, folder: RunFolder, recipe: Recipe) -> Start:
        """Read the selected checkpoint of a finished run."""
        path = folder.best if folder.best.exists() else folder.last
        loss = read_part(path, "loss")[1]
        if "proxies.weight" not in loss:
            raise UsageError(
                f"the run in {folder.path} has no proxies (loss.name {recipe.loss.name}). Train a "
                "new run on all images."
            )
        weight = loss["proxies.weight"]
        proxies = Proxies(len(weight), weight.shape[2], weight.shape[1])
        proxies.load_state_dict({name: loss[f"proxies.{name}"] for name in proxies.state_dict()})
        of_classes = ("proxies.", "class_counts")
        others = {k: v for k, v in loss.items() if not any(name in k for name in of_classes)}
        embedder = read_part(path, "average" if recipe.training.ema else "embedder")[1]
        return cls(proxies, embedder, others)

    @property
    def classes(self) -> list[str]:
        """The classes that the other run was trained on."""
        return self.proxies.names or []

    def on_start(self, run: Run) -> None:
        """Set the initial state of a run that is not resumed."""
        if run.world.on_main(run.folder.last.exists):
            return
        updater, data = run.updater, run.data
        for embedder in filter(None, (updater.embedder, updater.average)):
            embedder.load_state_dict(self.embedder)
        objective = updater.objective
        objective.load_state_dict(objective.state_dict() | {**self.loss})
        rows = data.rows["train"]
        rows = rows[~np.isin(np.asarray(data.catalog.labels)[rows], self.classes)]
        part = data.catalog.subset(rows)
        order = torch.from_numpy(np.argsort(part.codes, kind="stable"))
        vectors = run.evaluator.embed(rows).float().cpu()[order]
        self.proxies.grow(
            part.class_names,
            optimizer=None,
            init=torch.split(vectors, np.bincount(part.codes).tolist()),
            generator=torch.Generator().manual_seed(derive_seed(run.recipe.training.seed)),
        )
        row_of = {name: row for row, name in enumerate(self.classes)}
        assert objective.proxies is not None
        with torch.no_grad():
            objective.proxies.weight.copy_(
                self.proxies.weight[[row_of[name] for name in data.class_names]]
            )
        if run.world.is_main:
            write_catalog(data.catalog, Path(run.recipe.data.root or ""))
        save_state(run)
        if run.world.size > 1:
            run.world.barrier()
            restore_state(run)  # all processes start from the state of the first


def extend(
    run: str | os.PathLike[str],
    new_images: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    root: str | os.PathLike[str] | None = None,
    epochs: int | None = None,
    keep_space: bool = False,
    replay: bool = True,
    device: str | None = None,
    resume: bool = True,
    display: Display | None = None,
    callbacks: Sequence[Callback | Any] = (),
) -> dict[str, Any]:
    """Add classes to a trained run: train on its images and new ones, in another folder.

    The new run starts from the embedder and the proxies of the old run, and proxies of new classes
    from the mean embeddings of their images. It is an ordinary run: the same call resumes it, and
    it can be extended again.

    Args:
        run: folder of a finished run.
        new_images: a folder of class folders, a table, a tar file, a file of vectors or a dataset.
            Images of known classes are added to these classes.
        out: folder of the new run; by default that of the old run with a number: runs/mine-2.
        root: path of the old images, if they have moved.
        epochs: number of epochs; by default a third of those of the old run, at least three and,
            if that run had as many, enough for 100 steps.
        keep_space: keep the embedder unchanged, so that galleries remain valid, and only add
            classes and proxies.
        replay: use the old images; without them, the old embedder is the teacher of the new one
            (`loss.relational`).
        device: cpu, cuda or cuda:1; None selects CUDA if there is a GPU.
        resume: resume a run in the folder; False removes it.
        display: shows progress.
        callbacks: called during the run; see `Callback`.

    Returns:
        The contents of results.json. ``extension`` has the metrics of old and new classes on unseen
        images, before and after.
    """
    world = join_processes(device)
    display = display if display is not None and world.is_main else Display()
    old, path = RunFolder(final_stage(Path(run))), Path(default_out(run) if out is None else out)
    recipe, images_of = _check_run(old)
    check_out(path, old.path, "old run")
    start = Start.read(old, recipe)
    catalogs = [_open_old(old, recipe, root)] if replay else []
    skip = recipe.data.bad_images == "skip"
    catalogs.append(open_dataset(*resolve_source(new_images), allow_missing=skip))
    old_names = {*start.classes}
    known = {*images_of, *old_names}
    is_vectors = isinstance(catalogs[-1], VectorCatalog)
    file = path.absolute() / (VECTORS_FILE if is_vectors else IMAGES_TABLE)
    catalog = join_catalogs(catalogs, file, known, old_names)
    names = catalog.subset(catalog.rows("train")).class_names
    new_classes = [name for name in names if name not in old_names]
    if not new_classes:
        raise UsageError(
            f"{os.fspath(new_images)} has no new classes for the run in {run}: all are among its "
            f"{len(known)} classes, unseen ones included. Add images of other classes, or train a "
            "new run."
        )
    for line in catalogs[-1].remarks():
        display.message(line)
    counts = Counter(catalog.labels)
    if more := sorted(name for name in known if counts[name] > replay * images_of.get(name, 0)):
        display.message(f"new images of known classes: {join_first(more)}")
    display.message(f"new classes: {join_first(new_classes)}")
    if replay and not keep_space and (missing := sorted(old_names - {*names})):
        display.message(
            f"warning: {len(missing)} old classes have no images and may be forgotten: "
            f"{join_first(missing)}"
        )
    images = len(catalog.rows("train"))
    new_recipe = extended_recipe(
        recipe, old.path, file, images, epochs, keep_space=keep_space, replay=replay
    )
    callbacks = [start, *check_callbacks(callbacks)]
    components = Components(data=catalog, classes=start.classes)
    context = RunContext(world, display, callbacks, components, resume)
    folder = RunFolder(path)
    with preserve_torch_state(world, path), display:
        results = train_run(new_recipe, folder, context)
        if "extension" in results:
            return results

        def compare() -> dict[str, Any]:
            before, after = (Embedder.load(home, str(world.device)) for home in (old.path, path))
            unseen = compare_unseen(before, after, catalog, new_recipe, new_classes)
            extension = {"of": Path(run).name, "new_classes": new_classes, "unseen": unseen}
            folder.write_results({**results, "extension": extension})
            return folder.read_results()

        return world.on_main(compare)


def default_out(run: str | os.PathLike[str]) -> Path:
    """Return the default folder of an extended run: mine-2 for mine, then mine-3."""
    path = Path(run)
    name, _, number = path.name.rpartition("-")
    is_extended = any((path / file).exists() for file in (IMAGES_TABLE, VECTORS_FILE))
    if is_extended and name and number.isdecimal():
        return path.with_name(f"{name}-{int(number) + 1}")
    return path.with_name(f"{path.name}-2")


def _check_run(folder: RunFolder) -> tuple[Recipe, dict[str, int]]:
    """Return the recipe of a finished run and its images by class; reject unsuitable runs.

    The classes include those held out of training.
    """
    saved = folder.inspect()
    if saved is None:
        raise UsageError(f"no run in {folder.path}. Pass the folder of a finished run.")
    if saved.results is None:
        raise UsageError(f"the run in {folder.path} is not finished. Resume it with `train`.")
    if saved.checkpoint is None:
        raise UsageError(f"the run in {folder.path} has no checkpoint: {folder.last} is missing")
    recipe = saved.recipe
    if custom := find_custom(recipe):
        raise UsageError(
            f"the run in {folder.path} has a custom component, {custom}, and cannot be extended. "
            "Train a new run on all images."
        )
    if recipe.loss.sharded:
        raise UsageError(f"the run in {folder.path} has loss.sharded and cannot be extended")
    return recipe, saved.checkpoint["images"]["classes"]


def _open_old(folder: RunFolder, recipe: Recipe, root: str | os.PathLike[str] | None) -> Catalog:
    """Open the images of the old run."""
    try:
        if root is not None:
            recipe = recipe.override({"data.root": os.path.abspath(root)})
        return open_catalog(recipe)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"cannot read the images of the run in {folder.path}: {error}. Pass their path with "
            "--root, or do without them: --no-replay."
        ) from error


def extended_recipe(
    recipe: Recipe,
    start: Path,
    file: Path,
    images: int,
    epochs: int | None,
    *,
    keep_space: bool,
    replay: bool,
) -> Recipe:
    """Return the recipe of a run that extends the one in ``start``.

    Its catalog is in ``file`` and has a number of training ``images``. Without ``replay`` the old
    embedder is the teacher.
    """
    if keep_space:
        for key in ("pca_dim", "bits"):
            if getattr(recipe.model, key):
                raise UsageError(
                    f"--keep-space excludes model.{key}, which is fitted on all training images"
                )
        if epochs is not None:
            raise UsageError(f"--keep-space trains no epochs, got --epochs {epochs}")
    elif epochs is not None and epochs < 1:
        raise UsageError(f"--epochs must be at least 1, got {epochs}")
    optimizer, before = recipe.optimizer, recipe.training.epochs
    if keep_space:
        epochs, share = 0, 1.0
    elif recipe.name.endswith(EXTENDED) and before > 0:
        epochs, share = epochs or before, 1.0
    else:  # head and proxies keep their rates
        enough = math.ceil(MIN_STEPS * recipe.data.batch_size / images)
        default = max(MIN_EPOCHS, math.ceil(before / 3), min(before or enough, enough))
        epochs, share = epochs or default, LR_SHARE
    schedule, teacher = recipe.schedule.name, {}
    if not (replay or keep_space):
        teacher = {"teacher": str(start.absolute()), "relational": TEACHER_WEIGHT}
    elif recipe.loss.teacher != EMA:  # that of the old run
        teacher = {"teacher": EMA, "relational": 0.0}
    dataset = "vectors" if file.name == VECTORS_FILE else "parquet"
    return recipe.override(
        {
            "name": recipe.name.removesuffix(EXTENDED) + EXTENDED,
            "data": {"dataset": dataset, "root": str(file), "columns": {}},
            "data.cache": "none" if keep_space else AUTO,
            "data.labels_from_name": None,
            "data.max_images_per_class": None,
            "data.label_noise": 0.0,
            "model.weights": str(start.absolute()),
            "loss": teacher,
            "optimizer": {
                "lr": optimizer.lr * share,
                "head_multiplier": optimizer.head_multiplier / share,
                "proxy_multiplier": optimizer.proxy_multiplier / share,
            },
            "schedule": {
                "name": schedule if schedule in ("constant", "cosine") else "step",
                "every": AUTO,
                "at": [],
                "warmup_steps": 0,
                "freeze_backbone_epochs": 0,
            },
            "training": {"epochs": epochs, "stop_after": 0},
            "training.max_steps": None,
            "training.max_time": None,
            "evaluation": {"protocol": "last", "untrained": False, "every": AUTO},
        }
    )


def join_catalogs(
    catalogs: Sequence[Catalog], file: Path, known: Collection[str], trained: Collection[str]
) -> Catalog:
    """Join the images of a run and new ones in one catalog, with absolute paths.

    Images that both list are used once. The classes held out of training become the split val.

    Args:
        catalogs: the old images, if any, and the new ones.
        file: where the catalog will be written.
        known: all classes of the old images.
        trained: those that the run was trained on.
    """
    kinds = {isinstance(catalog, VectorCatalog) for catalog in catalogs}
    if len(kinds) > 1:
        raise UsageError("the images of the run and the new ones must both be images, or vectors")
    has_roles = any(catalog.queries is not None for catalog in catalogs)
    rows: dict[str, tuple[Any, ...]] = {}
    for number, catalog in enumerate(catalogs):
        is_old = number < len(catalogs) - 1
        for row, (label, split) in enumerate(zip(catalog.labels, catalog.splits, strict=True)):
            if is_old and label not in known:  # added to the folder after training
                continue
            if split in ("all", "train"):
                split = "val" if label in known and label not in trained else "train"
            roles = (split == "test",) * 2
            if catalog.queries is not None and catalog.galleries is not None:
                roles = (catalog.queries[row], catalog.galleries[row])
            vector = catalog.vectors[row] if isinstance(catalog, VectorCatalog) else None
            path = os.path.abspath(catalog.file(row))
            rows.setdefault(path, (label, split, *roles, vector))
    labels, splits, queries, galleries, vectors = zip(*rows.values(), strict=True)
    fields: dict[str, Any] = {"labels": labels, "splits": splits}
    if has_roles:
        fields |= {"queries": queries, "galleries": galleries}
    if kinds == {True}:
        if len({len(vector) for vector in vectors}) > 1:
            raise UsageError("the vectors of the run and the new ones differ in dimension")
        if all(catalog.has_paths for catalog in catalogs):  # type: ignore[attr-defined]
            fields["paths"] = [*rows]
        joined: Catalog = VectorCatalog.from_arrays(np.stack(vectors), source=str(file), **fields)
    else:
        joined = Catalog(tuple(rows), root=file.parent, **fields)
    return replace(joined, notes=tuple(joined.shared_classes()))


def write_catalog(catalog: Catalog, file: Path) -> None:
    """Write a catalog of images as Parquet, or of vectors as .npz, for `open_dataset`."""
    if not isinstance(catalog, VectorCatalog):
        with atomic_path(file) as part:
            catalog.to_parquet(part)
        return
    names = ("labels", "splits", "queries", "galleries")
    fields: dict[str, Any] = {name: getattr(catalog, name) for name in names}
    fields["paths"] = None if catalog.root == file else catalog.paths
    arrays: dict[str, Any] = {
        name: np.array(list(values)) for name, values in fields.items() if values is not None
    }
    buffer = io.BytesIO()
    np.savez(buffer, vectors=catalog.vectors, **arrays)
    atomic_write(file, buffer.getvalue())


def compare_unseen(
    before: Embedder,
    after: Embedder,
    catalog: Catalog,
    recipe: Recipe,
    new_classes: Collection[str],
) -> dict[str, dict[str, Any]]:
    """Evaluate old and new classes with two embedders, on held-out and test images.

    The gallery of a query has the images of all classes. Returns nothing without such images.
    """
    unseen = drop_unused_roles(catalog.subset(catalog.rows("val", "test")))
    if not len(unseen) or explain_missing_positives(unseen):
        return {}
    results: dict[str, dict[str, Any]] = {}
    for time, embedder in (("before", before), ("after", after)):
        vectors = encode_catalog(embedder, unseen, recipe.evaluation.batch_size)
        metrics = recipe.evaluation.metrics.per_query_only()
        scored = score_queries(vectors, unseen, recipe.evaluation.similarity, metrics)
        evaluation = scored[vectors.shape[1]]
        is_new = np.isin(evaluation.classes[evaluation.query_codes], [*new_classes])
        for name, mask in (("old", ~is_new), ("new", is_new)):
            mask = mask & evaluation.is_scored
            if mask.any():
                scores = {
                    key: float(values[mask].mean()) for key, values in evaluation.scores.items()
                }
                results.setdefault(name, {})[time] = {**scores, "queries": int(mask.sum())}
    return results


def describe_extension(results: Mapping[str, Any]) -> str:
    """Return the table of old and new classes on unseen images, before and after."""
    unseen = results["extension"]["unseen"]
    rows = {
        f"{name} classes, {time}": part[time]
        for name, part in unseen.items()
        for time in ("before", "after")
    }
    if not rows:
        return (
            "Nothing was compared: there are no unseen images. Give the new images a split test, "
            "in a folder test/ or a column split."
        )
    return metrics_table(rows)
