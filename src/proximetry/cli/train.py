"""`proximetry train`: options, recipe, run folder, and the summary with the next commands."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args, get_origin
from typing import get_type_hints as type_hints

from cyclopts import Group, Parameter, Token

from proximetry.cli.options import AsJson, ColumnPairs, Device, Flag
from proximetry.cli.output import print_result, wrap
from proximetry.data.datasets import resolve_source
from proximetry.recipe.loading import YamlError, merge, parse_yaml, read_yaml
from proximetry.recipe.schema import AUTO, Recipe, Section
from proximetry.training.plan import Plan, make_plan


def _read_value(kind: Any, tokens: tuple[Token, ...], *, as_text: bool = False) -> Any:
    """Parse option values as YAML (the recipe validates them) or as text; null is None."""
    if as_text:
        return None if tokens[0].value == "null" else tokens[0].value
    values = []
    for token in tokens:
        try:
            values.append(parse_yaml(token.value) if token.value.strip() else token.value)
        except YamlError:
            values.append(token.value)
    if get_origin(kind) is not tuple:
        return values[0]
    return [] if values in ([""], [[]], [None]) else values  # cyclopts turns [] into ""


COMMON = Group("Common", sort_key=0)
OUTPUT = Group("Configuration and output", sort_key=1)
_COMMON_KEYS = (
    *("model.backbone", "model.image_size", "loss.name", "data.batch_size", "optimizer.lr"),
    *("training.epochs", "training.max_time", "training.seed"),
)


def _option(key: str, kind: Any, default: Any, about: str) -> Any:
    """Return the annotated type of a key's option."""
    group: Any = {"group": COMMON} if key in _COMMON_KEYS else {}
    members = [member for member in get_args(kind) if member is not type(None)]
    optional = type(None) in get_args(kind)
    kind = members[0] if optional and len(members) == 1 else kind
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    origin = get_origin(kind)
    plain = (kind is str and not optional) or (kind is bool and default != AUTO)
    if plain or origin is Literal:
        return Annotated[kind, Parameter(help=about, **group)]
    if origin is dict:
        value: Any = Annotated[Any, Parameter(converter=_read_value)]
        pairs: Any = ColumnPairs if about.endswith("label=category") else dict[str, value]
        return Annotated[pairs, Parameter(help=about)]
    hint: Any = tuple[Any, ...] if origin is tuple else Any
    word = {str: "STR", bool: "auto|true|false"}.get(kind, "N" if "int" in str(kind) else "X")
    read = partial(_read_value, as_text=kind is str)
    return Annotated[hint, Parameter(help=about, metavar=word, converter=read, **group)]


def key_options(section: Any, prefix: str = "") -> Any:
    """Return a dictionary type with an option for each key of a section."""
    hints: dict[str, Any] = {}
    if dataclasses.is_dataclass(section):
        kinds = type_hints(section)
        for field in dataclasses.fields(section):
            key, about = f"{prefix}{field.name}", field.metadata["help"]
            hints[field.name] = _option(key, kinds[field.name], field.default, about)
    else:
        for name, info in section.model_fields.items():
            kind: Any = info.annotation
            is_section = isinstance(kind, type) and issubclass(kind, Section)
            if is_section or dataclasses.is_dataclass(kind):
                hints[name] = key_options(kind, f"{prefix}{name}.")
            else:
                about = info.description or ""
                hints[name] = _option(f"{prefix}{name}", kind, info.default, about)
    return TypedDict(f"{section.__name__}Options", hints, total=False)  # type: ignore[operator]


RecipeOptions: Any = Annotated[
    key_options(Recipe),
    Parameter(
        name="*",
        group=Group(
            "Recipe keys",
            help="Defaults are the recipe's values; --print-config prints them.",
            sort_key=2,
        ),
    ),
]


def train(
    images: str,
    out: Path | None = None,
    /,
    *,
    recipe: Annotated[str | None, Parameter(group=COMMON)] = None,
    device: Annotated[Device, Parameter(group=COMMON)] = None,
    fresh: Annotated[Flag, Parameter(group=COMMON)] = False,
    dry_run: Annotated[Flag, Parameter(group=COMMON)] = False,
    config: Annotated[Path | None, Parameter(group=OUTPUT)] = None,
    print_config: Annotated[Flag, Parameter(group=OUTPUT)] = False,
    as_json: Annotated[AsJson, Parameter(group=OUTPUT)] = False,
    overrides: RecipeOptions = {},  # noqa: B006
) -> None:
    """Train an embedder on your images or from a recipe, or resume an interrupted run.

    Every key of the recipe can be overridden, as in: --optimizer.lr 2e-4 --training.epochs 30

    Args:
        images: a folder of class folders, a table (.csv, .parquet), a .tar or .rec file, or a
            dataset's name; or precomputed vectors (.npz, .npy, .parquet, as `proximetry embed`
            writes); or a recipe (shipped name or YAML file) with a dataset, whose path is
            --data.root.
        out: run folder; a run in it resumes with its own recipe. Default: in runs/, named after the
            images or the recipe.
        recipe: for your images: a shipped recipe's name or a YAML file (see: proximetry recipes);
            default: `default` on a GPU, `default-cpu` elsewhere, `vectors` for vectors.
        fresh: remove the run in the folder, even if it is complete, and start over.
        dry_run: validate everything, decode the images (at most 20 000), estimate time, disk and
            memory; write nothing.
        config: a YAML file with overrides; those on the command line take precedence.
        print_config: print the recipe with all overrides, and exit.
        overrides: keys of the recipe.
    """
    changes = read_yaml(config, "overrides") if config is not None else {}
    changes = merge(changes, overrides, is_complete=False)
    plan = make_plan(images, out, recipe, changes, device, fresh)
    start_run(
        plan, device, fresh=fresh, dry_run=dry_run, print_config=print_config, as_json=as_json
    )


def start_run(
    plan: Plan,
    device: str | None,
    *,
    fresh: bool,
    dry_run: bool,
    print_config: bool,
    as_json: bool,
    references: Mapping[str, Mapping[str, Any]] = {},
) -> None:
    """Train as planned and print the results, beside metrics of other runs (see `summary`)."""
    if print_config:
        print(plan.recipe.to_yaml(), end="")
        return
    from proximetry.training.reporting import make_display

    is_main = os.environ.get("RANK", "0") == "0"  # only rank 0 prints
    display = make_display(sys.stderr if as_json else None)
    for line in plan.lines if is_main else ():
        display.message(line)
    from proximetry.training import train as run  # imports timm, after the first lines
    from proximetry.training.dry_run import describe
    from proximetry.training.dry_run import dry_run as estimate

    start = estimate if dry_run else run
    results = start(plan.recipe, plan.out, device=device, resume=not fresh, display=display)
    text = describe(results) if dry_run else summary(results, plan, references)
    if is_main:
        document = results if dry_run else {"folder": str(plan.out), **results}
        print_result(as_json, document, text)


def summary(
    results: Mapping[str, Any], plan: Plan, references: Mapping[str, Mapping[str, Any]] = {}
) -> str:
    """Return the table of metrics, the paths of the results, and the next commands to type.

    ``references`` are further rows of the table.
    """
    from proximetry.models.storage import SECOND_STAGE
    from proximetry.training.metrics_table import describe_protocol, metrics_table, result_rows
    from proximetry.training.run_folder import FIRST_STAGE

    recipe, data, rows = plan.recipe, plan.recipe.data, result_rows(results)
    table = metrics_table({**references, **rows}) if rows else ""
    if not rows:
        reason = "there is no test set"
        if not recipe.evaluation.final_test:
            reason = "evaluation.final_test is false"
        message = f"Nothing was evaluated: no classes were held out, and {reason}."
        if "first_stage" in results:
            message = (
                f"The second stage was not evaluated: it trained on all classes, and {reason}; the "
                f"first stage's metrics are in {_short(plan.out / FIRST_STAGE / 'results.json')}."
            )
        table = wrap(f"{message} Evaluate the embedder on images of other classes.")
    folder = plan.out / SECOND_STAGE if recipe.training.two_stages else plan.out
    takes_images = data.dataset != "vectors"
    run, images = _short(plan.out), _short(Path(data.root or "IMAGES"))
    pairs = ",".join(f"{field}={column}" for field, column in data.columns.items())
    data_options = f" --columns {shlex.quote(pairs)}" if pairs else ""
    data_options += " --bad-images skip" if data.bad_images == "skip" else ""
    test_source = "OTHER_IMAGES"
    if "test" in results["selected"]:
        test_source = data.dataset if data.root is None else f"{data.dataset} --root {images}"
        if data.root is not None and resolve_source(data.root)[0] == data.dataset:
            test_source = images
        test_source += data_options
        if data.labels_from_name is not None:
            test_source += f" --labels-from-name {shlex.quote(data.labels_from_name)}"
    return "\n".join(
        [
            table,
            "",
            wrap(describe_protocol(results, recipe.evaluation.select_by)),
            f"embedder: {_short(folder / 'embedder')}",
            f"results:  {_short(folder / 'results.json')}",
            "",
            "Next:",
            f"  proximetry report {run}",
            f"  proximetry evaluate {run} {test_source}",
            *([f"  proximetry index {images} --model {run}{data_options}"] if takes_images else []),
            *(["  proximetry search QUERY.jpg", "  proximetry serve"] if takes_images else []),
            f"  proximetry embed {run} {images} --out embeddings.npz{data_options}",
            f"  proximetry export {run} {shlex.quote(f'{plan.out.name}.onnx')}",
        ]
    )


def _short(path: Path) -> str:
    """Return a quoted path, relative to the working or the home folder if it is inside."""
    whole = path.absolute()
    for base, prefix in ((Path.cwd(), ""), (Path.home(), "~/")):
        if whole.is_relative_to(base) and whole != base:
            return f"{prefix}{shlex.quote(str(whole.relative_to(base)))}"
    return shlex.quote(str(whole))
