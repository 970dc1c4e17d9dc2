"""`distill`: train a smaller network that follows a run or another embedder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError
from proximetry.models.constants import WEIGHTS_SOURCES
from proximetry.models.storage import SECOND_STAGE
from proximetry.recipe.loading import describe_resets, flatten
from proximetry.recipe.schema import AUTO, Recipe
from proximetry.training.callbacks import Callback
from proximetry.training.custom_components import find_custom
from proximetry.training.extension import EXTENDED
from proximetry.training.plan import Plan
from proximetry.training.reporting import Display
from proximetry.training.run_folder import RunFolder, check_out, final_stage
from proximetry.training.trainer import train

DISTILLATION_WEIGHT = 100.0
"""Weight of `loss.relational`."""
_SUFFIX = ", distilled"
_DATA_KEYS = (
    "dataset",
    "root",
    "columns",
    "labels_from_name",
    "suggestions",
    "bad_images",
    "max_images_per_class",
    "label_noise",
)


def distill(
    teacher: str | os.PathLike[str],
    out: str | os.PathLike[str],
    settings: Mapping[str, Any],
    *,
    recipe: str | None = None,
    device: str | None = None,
    resume: bool = True,
    display: Display | None = None,
    callbacks: Sequence[Callback | Any] = (),
) -> dict[str, Any]:
    """Train another network whose similarities follow those of a teacher; return its results.

    It is an ordinary run of `train`, with ``loss.relational`` and ``loss.teacher``. The teacher
    gets the same crops in its own input size.

    Args:
        teacher: folder of a run, or with a ``recipe`` any embedder, as for `Embedder.load`.
        out: folder of the new run.
        settings: recipe keys to override, such as ``{"model.backbone": "tf_efficientnet_lite0"}``.
        recipe: name or YAML file of a recipe; by default that of the teacher. Images always come
            from the teacher's run, if it is one.
        device: as for `train`, like the other arguments.
    """
    plan = plan_distillation(teacher, out, settings, recipe)
    return train(
        plan.recipe, plan.out, device=device, resume=resume, display=display, callbacks=callbacks
    )


def plan_distillation(
    teacher: str | os.PathLike[str],
    out: str | os.PathLike[str],
    settings: Mapping[str, Any],
    recipe_name: str | None = None,
) -> Plan:
    """Return the recipe and the folder of a run that distills a teacher."""
    path = Path(teacher)
    folder = RunFolder(final_stage(path))
    check_out(Path(out), folder.path, "teacher")
    trained = folder.read_recipe()
    source = str(path.absolute()) if path.exists() else os.fspath(teacher)
    changes: dict[str, Any] = {"loss": {"teacher": source, "relational": DISTILLATION_WEIGHT}}
    if recipe_name is not None:
        recipe = Recipe.load(recipe_name)
        if trained is not None:
            changes["data"] = {key: getattr(trained.data, key) for key in _DATA_KEYS}
            changes["evaluation.held_out"] = trained.evaluation.held_out
    elif trained is None:
        raise UsageError(
            f"no run in {path}. Pass the folder of a run, or for another embedder --recipe and "
            "--data.root too."
        )
    elif trained.name.endswith(EXTENDED) or folder.path.name == SECOND_STAGE:
        raise UsageError(
            f"the run in {folder.path} is an extension or a second stage, whose schedule does not "
            "suit a new network. Pass --recipe: a shipped recipe, such as default, or a YAML file."
        )
    elif not any(key.startswith("model.") for key in flatten(dict(settings))):
        raise UsageError("the student has no network. Pass --backbone, or another key of model.")
    else:
        recipe = trained
        changes |= _keys_of_another_network(trained)
    recipe = recipe.override(changes | {"name": recipe.name.removesuffix(_SUFFIX) + _SUFFIX})
    lines = describe_resets(recipe.to_dict(), settings)
    recipe = recipe.override(settings)
    if custom := find_custom(recipe):
        raise UsageError(
            f"the student's recipe has a custom component, {custom}. Override it, or call `train` "
            "in Python with loss.teacher and loss.relational."
        )
    return Plan(recipe, Path(out), (f"teacher {teacher}", *lines))


def _keys_of_another_network(recipe: Recipe) -> dict[str, Any]:
    """Return changes of keys that depend on the teacher's network and machine."""
    model = recipe.model
    return {
        "model": {
            "weights": model.weights if model.weights in WEIGHTS_SOURCES else AUTO,
            "pooling": AUTO if model.pooling in ("token", "cls-avg", "flatten") else model.pooling,
            "freeze_backbone": False,
            "lora_rank": None,
            "lora_alpha": None,
        },
        "data.cache": AUTO,
        "optimizer.layer_decay": 1.0,
        "training": {"precision": AUTO, "cuda_graph": AUTO},
    }
