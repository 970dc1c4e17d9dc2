"""Render the Markdown page of a table from its runs and the templates of this package."""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from proximetry._util.formatting import format_int, pluralize
from proximetry.data import list_datasets
from proximetry.recipe.schema import DataConfig, Recipe
from proximetry.reproduce.figures import curve, explain_missing_seconds, figure_names
from proximetry.reproduce.plan import command_for
from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.statistics import compare_claim, pairwise_differences, sample
from proximetry.training.schedule import drop_epochs

_TEMPLATES = Environment(
    loader=PackageLoader("proximetry.reproduce"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_CONVERGED = 0.95  # fraction of the best final recall
_OVERVIEW = ("recall@1", "map@r", "mean_angle")
_MAX_NOTES = 3


def page(results: Results) -> str:
    """Return the page of a table."""
    return _render("page.md", results)


def overview(results: Results, folder: str) -> str:
    """Return a section for a page about several tables; ``folder`` contains the table's page."""
    return _render("overview.md", results, folder=folder)


def grid(columns: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """Return a table in Markdown; None is a dash."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join("—" if c is None else str(c) for c in cells) + " |"

    names = list(columns)
    return "\n".join([line(names), "|" + "---|" * len(names), *map(line, lines)])


def comparison(results: Results) -> str:
    """Return the means of all rows, best first, and which differences are significant."""
    computed, several = (
        {key for run in results.runs for key in run.metrics()},
        len(results.seeds) > 1,
    )
    metrics = [name for name in results.table.metrics if name in computed]
    lines = []
    for name, runs in results.runs_of.items():
        samples = [sample(runs, metric) for metric in metrics]
        if samples[0] is not None:
            cells = [
                "—" if s is None else f"{s.mean:.1f}{_plus_minus(s.ci_half_width)}" for s in samples
            ]
            lines.append((samples[0].mean, [name, *cells, f"{_mean_seconds(runs)}"]))
    ranked = [cells for _, cells in sorted(lines, key=lambda line: -line[0])]
    tested = pairwise_differences(results, metrics[0])
    verdicts = [
        [
            f"{one.better} above {one.worse}",
            f"{one.mean:+.1f}{_plus_minus(one.ci_half_width)}",
            "significant" if one.is_significant else "no significant difference",
        ]
        for one in tested
    ]
    interval = "mean ± 95 % confidence interval over the seeds" if several else "one seed"
    note = "One seed: no difference is tested. Pass two seeds or more."
    if several:
        note = (
            "± is the confidence interval of Welch's t-test, 95 % for all differences together "
            f"(Bonferroni, {pluralize(len(tested), 'test')}). It covers the seeds, not the choice "
            "of the images."
        )
    parts = [
        _aligned(["loss", *metrics, "seconds"], ranked),
        f"Percent on the held-out classes at the last epoch, {interval}; seconds of training.",
        _aligned(["difference", metrics[0], "verdict"], verdicts),
        note,
    ]
    return "\n\n".join(parts)


def _plus_minus(half_width: float | None) -> str:
    return "" if half_width is None else f" ± {half_width:.1f}"


def _aligned(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with aligned columns, readable in a terminal."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    padded = ([cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _values(values: Iterable[Any], missing: str = "the network's default") -> str:
    """Return the distinct values, separated by commas; ``missing`` stands for None."""
    texts = (
        missing if value is None else f"{value:g}" if isinstance(value, float) else str(value)
        for value in values
    )
    return ", ".join(dict.fromkeys(texts))


_TEMPLATES.filters["values"] = _values


def _render(template: str, results: Results, **values: Any) -> str:
    table = results.table
    values |= {"table": table, "results": results}
    if results.runs:
        values |= _training_settings(results) | _differences(results)
        values["comparison"] = table.comparison and comparison(results)
        values["ranking"] = table.protocol == "held_out" and _ranking(results)
        values["not_run"] = [name for name, runs in results.runs_of.items() if not runs]
        claims = [(claim, compare_claim(claim, results)) for claim in table.claims]
        selection = next(iter(results.selection.values()), None)
        lines = [] if selection is None else selection.curve
        curves = table.figure is not None and table.figure.kind == "curves"
        values |= {
            "missing": results.missing(),
            "summary": _summary(results),
            "table_of_metrics": _metrics(results),
            "angles": any(metric.endswith("_angle") for metric in table.metrics),
            "selection": selection,
            "distractors": any("with_distractors" in line.get("held_out", {}) for line in lines),
            "no_seconds": explain_missing_seconds(results),
            "claim_results": claims,
            "tested": sum(len(result.seeds) > 1 for _, result in claims),
            "during_training": curves and _during_training(results),
            **(_convergence(results) if curves else {}),
            "figures": figure_names(results),
        }
    text = _TEMPLATES.get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _columns(results: Results) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the arguments of `sample` by heading: a metric, and the part of the embedding."""
    metrics, first = results.table.metrics, results.table.metrics[0]
    views = dict.fromkeys(view for record in results.runs for view in record.views or ())
    return {
        **{name: (name, {}) for name in metrics},
        **{f"{first}, first {d} dimensions": (first, {"dim": d}) for d in results.table.dims},
        **{f"{first}, {view}": (first, {"view": view}) for view in views},
    }


def _metrics(results: Results) -> str:
    """Return the table of our metrics and the published ones."""
    table, columns = results.table, _columns(results)
    lines: list[list[object]] = []
    for row in table.rows:
        runs, selection = results.runs_of[row.name], results.selection.get(row.name)

        def cells(epoch: int | None = None, runs: list[Record] = runs) -> list[object]:
            return [sample(runs, name, epoch, **arguments) for name, arguments in columns.values()]

        seeds = f"last epoch, seed{'s' * (len(runs) > 1)} {', '.join(str(r.seed) for r in runs)}"
        groups: list[list[object]] = [[f"ours, {seeds if runs else 'not run'}", *cells()]]
        groups[0] += [_mean_seconds(runs)] * table.seconds
        if any(cells(0)):
            groups.insert(0, ["untrained", *cells(0)])
        if selection is not None:
            epoch = selection.selected_epoch
            groups.append([f"ours, epoch {epoch}, selected on held-out classes", *cells(epoch)])
        if row.published:
            published = [row.published.get(name) for name in columns]
            texts = [None if value is None else f"{value:.1f}" for value in published]
            groups.append([f"published, {table.published.backbone}", *texts])
        width = 1 + len(columns) + table.seconds
        lines += [["", *group, *[None] * (width - len(group))] for group in groups]
        lines[-len(groups)][0] = row.name
    return grid(["", "", *columns, *["seconds"] * table.seconds], lines)


def _summary(results: Results) -> str:
    """Return the main metrics of each row: untrained, at the last epoch, published."""
    table, lists = results.table, list(results.runs_of.values())
    columns: dict[str, list[Any]] = {}
    for heading, (metric, arguments) in _columns(results).items():
        if metric in _OVERVIEW:
            columns |= {
                f"{heading}, untrained": [sample(runs, metric, 0, **arguments) for runs in lists],
                heading: [sample(runs, metric, **arguments) for runs in lists],
                f"{heading}, published": [row.published.get(heading) for row in table.rows],
            }
    if table.seconds:
        columns["seconds"] = [_mean_seconds(runs) for runs in lists]
    shown = {heading: cells for heading, cells in columns.items() if any(cells)}
    return grid(["", *shown], zip(results.runs_of, *shown.values(), strict=True))


def _mean_seconds(runs: Sequence[Record]) -> str | None:
    return f"{fmean(run.seconds for run in runs):.0f}" if runs else None


def _ranking(results: Results) -> str:
    """Return the rows of a search in descending order of the first metric."""
    columns = _columns(results)
    lines: list[tuple[float, list[object]]] = []
    for row in results.table.rows:
        runs = results.runs_of[row.name]
        if not runs:
            continue
        samples = [sample(runs, metric, **arguments) for metric, arguments in columns.values()]
        texts = [None if values is None else f"{values.mean:.2f}" for values in samples]
        changes = ", ".join(f"{key} {value}" for key, value in row.changes.items())
        cells: list[object] = [row.name, *texts, len(runs), _mean_seconds(runs), changes or "none"]
        lines.append((-math.inf if samples[0] is None else samples[0].mean, cells))
    ranked = sorted(lines, key=lambda line: line[0], reverse=True)
    return grid(["row", *columns, "seeds", "s", "changes"], (cells for _, cells in ranked))


def _during_training(results: Results) -> str:
    curves = {name: dict(curve(runs, "epoch")) for name, runs in results.runs_of.items()}
    evaluated = sorted({int(epoch) for points in curves.values() for epoch in points})
    listed_epochs = [e for e in evaluated if e in (1, 2, 5, 10, 20, 40) or e == evaluated[-1]]
    lines = [
        [name, *(f"{points[e]:.1f}" if e in points else None for e in listed_epochs)]
        for name, points in curves.items()
    ]
    return grid(["", *(f"epoch {epoch}" for epoch in listed_epochs)], lines)


def _convergence(results: Results) -> dict[str, Any]:
    """Return when each row reaches `_CONVERGED` of the best final recall."""
    final = [sample(runs, "recall@1") for runs in results.runs_of.values()]
    target = _CONVERGED * max((s.mean for s in final if s is not None), default=0.0)
    keys = {"epoch": "epochs"}
    if not explain_missing_seconds(results):
        keys["seconds"] = "seconds of training"

    def reached(runs: list[Record], key: str) -> str | None:
        first = next((x for x, recall in curve(runs, key) if recall >= target), None)
        return f"{first:.0f}" if first is not None else "not reached" if runs else None

    lines = [
        [name, *(reached(runs, key) for key in keys)] for name, runs in results.runs_of.items()
    ]
    return {"table_of_convergence": grid(["", *keys.values()], lines), "target": target}


def _training_settings(results: Results) -> dict[str, Any]:
    """Return data, network, epochs, versions and command of the runs."""
    table, runs, all_runs = results.table, results.runs, results.all_runs
    first, environments = runs[0], [record.environment for record in all_runs]
    trained = [record.recipe["training"]["epochs"] for record in runs]
    rows = [table.epochs(table.row(record.row)) for record in runs]
    planned = [n if isinstance(n, int) else actual for actual, n in zip(trained, rows, strict=True)]
    epochs = f"{_values(sorted(trained))} epochs"
    if trained != planned:
        published = table.published.epochs
        total = f"published {published}" if published else f"table's {_values(sorted(planned))}"
        epochs = f"{_values(sorted(trained))} of the {total} epochs"
    commits = {
        e["git"]["commit"][:10] + (" with changes" if e["git"]["changed"] else "")
        for e in environments
        if e["git"]
    }
    notes = list(dict.fromkeys(n.rstrip(".") for record in all_runs for n in record.notes))
    return {
        "setting": lambda section, key: _values(record.recipe[section][key] for record in runs),
        "datasets": dict.fromkeys(map(_dataset, all_runs)),
        "notes": notes[:_MAX_NOTES],
        "more_notes": len(notes) - _MAX_NOTES,
        "dimensions": _values(map(_dimensions, runs)),
        "weights": _values(map(_weights, runs), "unknown"),
        "epochs": epochs,
        "scaled": trained != planned,
        "dates": sorted(e["started"][:10] for e in environments),
        "environments": environments,
        "gpu": any(record.device != "CPU" for record in all_runs),
        "commits": sorted(commits),
        "command": command_for(
            table,
            first.row,
            results.seeds,
            first.recipe,
            results.selected(),
            first.epochs_overridden,
        ),
        "held_out": [100 * record.recipe["evaluation"]["held_out"] for record in runs],
    }


def _dataset(record: Record) -> str:
    title, images = list_datasets()[record.recipe["data"]["dataset"]].title, record.images
    if images is None:
        return f"{title}: unknown number of images"
    return (
        f"{title}: {format_int(images['train'])} training, {format_int(images['test'])} test images"
    )


def _dimensions(record: Record) -> str:
    dim, reduced = record.recipe["model"]["dim"], record.recipe["model"]["pca_dim"]
    return f"{reduced} dimensions (PCA of {dim})" if reduced else f"{dim} dimensions"


def _weights(record: Record) -> str | None:
    origin, digest = record.weights["origin"], record.weights["sha256"]
    return f"{origin} (sha256 {digest[:10]}…)" if digest else origin


def _differences(results: Results) -> dict[str, Any]:
    """Return how the runs differ from the published setting."""
    recipes = [Recipe.load(record.recipe) for record in results.runs]
    models = [recipe.model for recipe in recipes]
    ends = [(recipe.schedule, recipe.training.epochs) for recipe in recipes]
    sides = [(recipe.data.short_side, recipe.model.resize) for recipe in recipes]

    def options(key: str) -> list[tuple[Any, str]]:
        values = [getattr(model, key) for model in models]
        note = "" if all(values) else ", unless the row overrides it"
        return [(value, note) for value in dict.fromkeys(filter(None, values))]

    return {
        "drops": _values(at for how, end in ends for at in drop_epochs(how, end) if at < end),
        "precisions": sorted({r.training.precision for r in recipes} - {"float32"}),
        "sides": [side or resize for side, resize in sides],
        "scaled_sides": ["both sides" if m.squash else "short side" for m in models],
        "ratios": sorted({r.data.crop_ratio for r in recipes} - {DataConfig().crop_ratio}),
        "scaled_up": any((side or math.inf) < (resize or 0) for side, resize in sides),
        "options": options,
        "reduced": dict.fromkeys((m.dim, m.pca_dim, m.whitening) for m in models if m.pca_dim),
    }
