"""Commands that list losses, backbones, recipes, datasets and metrics."""

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError
from proximetry.cli.options import AsJson, LabelsFromName, TableColumns
from proximetry.cli.output import columns, print_result, wrap


def losses(name: str | None = None, *, as_json: AsJson = False) -> None:
    """List the losses, or show one with its settings and when to use it.

    Args:
        name: the loss to show.
    """
    from proximetry.losses import LOSSES, PAIR_LOSSES, ProxyLoss, loss_settings
    from proximetry.losses.pairs import USE

    shared = ProxyLoss.settings()
    pairs = {f"pairs/{pair}": make for pair, make in PAIR_LOSSES.items()}
    document: dict[str, Any] = {}
    for key in [*LOSSES, *pairs] if name is None else [name]:
        settings = loss_settings(key)  # an unknown name is an error
        source: Any = LOSSES.get(key) or pairs[key]
        about, *more = (inspect.getdoc(source) or "").replace("``", "").split("\n\n")
        document[key] = {
            "about": about,
            "more": more,
            "use": LOSSES[key].use if key in LOSSES else USE,
            "settings": {
                # The help is Markdown for the documentation.
                k: {"default": s.default, "type": s.check.kind, "about": s.help.replace("**", "")}
                for k, s in settings.items()
            },
        }
    if name is None:
        entries = {}
        for key, loss in document.items():
            values = {k: s["default"] for k, s in loss["settings"].items() if k not in shared}
            defaults = ", ".join(f"{k} {_format_default(v)}" for k, v in values.items())
            entries[key] = [loss["about"], defaults]
        print_result(as_json, document, columns(entries))
        return
    loss = document[name]
    paragraphs = [f"{name}: {loss['about']}", *loss["more"], f"When to use it: {loss['use']}"]
    parts = [wrap(text) for text in paragraphs]
    rows = {
        key: [f"{s['about']} ({s['type']}) [default: {_format_default(s['default'])}]"]
        for key, s in loss["settings"].items()
    }
    if rows:
        parts += [f"Settings (--loss.settings.{next(iter(rows))} …):", columns(rows)]
    print_result(as_json, loss, "\n\n".join(parts))


def _format_default(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def backbones(pattern: str | None = None, *, as_json: AsJson = False) -> None:
    """List the built-in backbones, or all that match a pattern, including timm's.

    Args:
        pattern: part of a name, or a name with wildcards, such as 'vit*dinov2*'.
    """
    from proximetry.models.backbones import extra_backbones, list_backbones
    from proximetry.models.weights import PACKAGES
    from proximetry.recipe.loading import plain_values, shipped_recipes

    notes = extra_backbones() | dict.fromkeys(PACKAGES, "ImageNet weights without a download.")
    for recipe in shipped_recipes():
        values = plain_values(recipe)
        if values["data"]["dataset"] == "folder":
            network = values["model"]["backbone"].partition(".")[0]  # a tag follows the dot
            notes.setdefault(network, f"`proximetry train IMAGES --recipe {recipe}`.")
    has_wildcards = pattern is not None and set("*?[") & set(pattern)
    names = list_backbones(pattern if has_wildcards and pattern else f"*{pattern or ''}*")
    if not names:
        raise UsageError(f"no backbone matches {pattern!r}. Try a shorter part of the name.")
    matches = {name: about for name, about in notes.items() if name in names}
    if pattern is not None or as_json:
        matches |= {name: notes.get(name, "") for name in names}
    text = columns({name: [about] for name, about in matches.items()})
    if pattern is None:
        text += f"\n\nand {len(names) - len(matches)} more in timm: proximetry backbones 'resnet*'"
    print_result(as_json, {name: {"about": about} for name, about in matches.items()}, text)


def recipes(name: str | None = None, *, as_json: AsJson = False) -> None:
    """List the shipped recipes, or print one as YAML.

    Args:
        name: the recipe to print.
    """
    from proximetry.recipe import Recipe
    from proximetry.recipe.loading import find_file, plain_values, shipped_recipes

    if name is not None:
        values = Recipe.load(name).to_dict() if as_json else plain_values(name)
        file = find_file(name, shipped_recipes(), "recipe", "recipes")
        print_result(as_json, values, file.read_text(encoding="utf-8").rstrip("\n"))
        return
    document, entries = {}, {}
    for name in sorted(shipped_recipes(), key=lambda name: not name.startswith("default")):
        values = plain_values(name)
        document[name] = {"about": values["about"], "dataset": values["data"]["dataset"]}
        entries[name] = [values["about"]]
    print_result(as_json, document, columns(entries))


def datasets(
    source: str | None = None,
    root: Path | None = None,
    *,
    names: TableColumns = None,
    labels_from_name: LabelsFromName = None,
    as_json: AsJson = False,
) -> None:
    """List the supported datasets, or describe one: splits, classes and images.

    Images are listed but not decoded; `proximetry train IMAGES --dry-run` also decodes them.

    Args:
        source: a dataset's name, or a folder, a CSV or Parquet table, or a tar file.
        root: path of the named dataset's images.
    """
    from proximetry.cli.inputs import open_images
    from proximetry.data import list_datasets, resolve_source

    infos = list_datasets()
    facts = {name: dataclasses.asdict(info) for name, info in infos.items()}
    for values in facts.values():
        del values["reader"]
    if source is None:
        print_result(as_json, facts, columns({name: [str(info)] for name, info in infos.items()}))
        return
    name, folder = resolve_source(source, root)
    if folder is None and not infos[name].built_in:
        print_result(as_json, facts[name], wrap(str(infos[name])))
        return
    catalog = open_images(name, folder, names, False, labels_from_name)
    document = {
        "dataset": name,
        "root": str(catalog.root),
        "images": len(catalog),
        "classes": len(catalog.class_names),
        "splits": Counter(catalog.splits),
        "notes": catalog.notes,
    }
    print_result(as_json, document, catalog.describe())


def metrics(*, as_json: AsJson = False) -> None:
    """List the metrics of `evaluate` with their options."""
    from proximetry.metrics import Metrics

    document, entries = {}, {}
    for field in dataclasses.fields(Metrics):
        about, default = field.metadata["help"], field.default
        values = default if isinstance(default, tuple) else ["yes" if default else "no"]
        document[field.name] = {"about": about, "default": default}
        text = " ".join(map(str, values)) or "none"
        entries[f"--{field.name.replace('_', '-')}"] = [f"{about} [default: {text}]"]
    print_result(as_json, document, columns(entries))


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (recipes, losses, backbones, datasets, metrics)
}
