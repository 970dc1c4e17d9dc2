"""The page of a table, made from its runs and nothing else."""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from proximetry._util.errors import spaced
from proximetry.data import list_datasets
from proximetry.recipe.schema import DataConfig, Recipe
from proximetry.reproduce.figures import curve, picture_names, why_no_seconds
from proximetry.reproduce.plan import command_for
from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.statistics import examine, sample
from proximetry.reproduce.table import Row
from proximetry.training.reporting import AMONG_TRAIN
from proximetry.training.schedule import drop_epochs

_MISSING = "not recorded"
_NEAR = 0.95  # of the best final recall: what counts as having arrived
_NOTES_SHOWN = 3


def page(results: Results, seeds: Sequence[int] = (), selected: Sequence[Row] | None = None) -> str:
    """The whole page.

    ``seeds`` and ``selected``, the rows whose epoch is selected, say what was asked for, done or
    not; without them it is the seeds that are there, and what the table says.
    """
    table = results.table
    parts = [f"# {table.title}", table.source]
    if not results.runs:
        return _joined([*parts, "No run of this table is done yet."])
    parts += [*_setting(results, selected), "## Results"]
    if table.protocol == "held_out":
        return _joined([*parts, *_ranking(results)])
    parts += _figures(results, seeds, selected)
    if table.claims:
        parts += ["## Claims", *_findings(results)]
    if table.figure is not None and table.figure.kind == "curves":
        parts += ["## Recall during training", *_during_training(results), *_convergence(results)]
    parts += _pictures(results, "")
    differences = "\n".join(f"- {line}" for line in _differences(results))
    return _joined([*parts, "## Differences from the published setting", differences])


def overview(results: Results, folder: str) -> str:
    """A section about a table for a page about several; ``folder`` is where its own page lies."""
    table = results.table
    seeds = len(results.seeds)
    words = [
        table.source,
        f"Ours: {_values(r.recipe['model']['backbone'] for r in results.runs)}, "
        f"{_epochs(results)}, {seeds} seed{'s' * (seeds > 1)}, last epoch, "
        f"{_values(r.device for r in results.runs)}, {_dates(results)[-1]}; "
        f"`{_command(results, None)}`.",
        f"Published: {table.published.backbone}, {table.published.protocol}."
        if table.published.backbone
        else "",
        table.published.note,
        f"Data: {_data(results)}.",
        f"[All figures, versions and differences]({folder}/README.md).",
    ]
    parts = [f"## {table.title}", " ".join(filter(None, words)), *_figures(results, (), None)]
    if table.claims:
        parts += _findings(results)
    if table.figure is not None and table.figure.kind == "curves":
        parts += _convergence(results)
    return _joined([*parts, *_pictures(results, f"{folder}/")])


def grid(columns: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A table in Markdown; None is a dash."""

    def line(cells: Iterable[object]) -> str:
        return "| " + " | ".join("—" if c is None else str(c) for c in cells) + " |"

    names = list(columns)
    return "\n".join([line(names), "|" + "---|" * len(names), *map(line, lines)])


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"


def _columns(results: Results) -> dict[str, tuple[str, dict[str, Any]]]:
    """What `sample` takes for each column, by its heading: a metric, and of which embedding."""
    metrics, first = results.table.metrics, results.table.metrics[0]
    views = dict.fromkeys(view for record in results.runs for view in record.views or ())
    return {
        **{name: (name, {}) for name in metrics},
        **{f"{first}, first {d} dimensions": (first, {"dim": d}) for d in results.table.dims},
        **{f"{first}, {view}": (first, {"view": view}) for view in views},
    }


def _figures(results: Results, seeds: Sequence[int], selected: Sequence[Row] | None) -> list[str]:
    """The table itself, what its lines mean, and what is missing."""
    table, columns = results.table, _columns(results)
    lines: list[list[object]] = []

    def add(name: str, what: str, cells: Sequence[object], seconds: str | None = None) -> None:
        lines.append([name, what, *cells, *([seconds] if table.seconds else [])])

    for row in table.rows:
        runs, name = results.runs_of[row.name], row.name
        untrained = [sample(runs, metric, 0, **of) for metric, of in columns.values()]
        if any(untrained):
            add(name, "untrained", untrained)
            name = ""
        ours = [sample(runs, metric, **of) for metric, of in columns.values()]
        add(name, f"ours, {_seeds(runs)}", ours, _mean_seconds(runs))
        found = results.selection.get(row.name)
        if found is not None:
            epoch = found.selected_epoch
            cells = [sample(runs, metric, epoch, **of) for metric, of in columns.values()]
            add("", f"ours, epoch {epoch}, selected on held-out classes", cells)
        if row.published:
            theirs = [row.published.get(name) for name in columns]
            shown = [None if value is None else f"{value:.1f}" for value in theirs]
            add("", f"published, {table.published.backbone}", shown)
    caption = "Percent; ours: mean ± sample standard deviation over the seeds."
    if any(metric.endswith("_angle") for metric in table.metrics):
        caption += (
            " Angles, in degrees, are of each class's proxy to its nearest rival: their mean and "
            "the smallest; separability is the mean of the cosines, where less is better."
        )
    for record in list(results.selection.values())[:1]:
        evaluation = record.recipe["evaluation"]
        among = any("among_train" in line.get("held_out", {}) for line in record.curve)
        caption += (
            f" One more run per row holds out {100 * evaluation['held_out']:.0f} % of the training "
            f"classes and selects the epoch with the best {evaluation['select_by']} on those"
            f"{f' {AMONG_TRAIN}' * among}; the figures are of the runs on all training classes at "
            "that epoch. The test set is not used for selection."
        )
    if table.seconds:
        caption += " Seconds are of training alone, without start and evaluation."
        reason = why_no_seconds(results)
        caption += f" They cannot be compared: {reason}." if reason else ""
    heads = ["", "", *columns, *(["seconds"] if table.seconds else [])]
    parts = [grid(heads, lines), caption]
    missing = results.missing(seeds, table.selected_rows() if selected is None else selected)
    if missing:
        parts.append(f"**Not complete.** Still missing: {', '.join(missing)}.")
    return parts


def _mean_seconds(runs: Sequence[Record]) -> str | None:
    """Over those runs that recorded theirs."""
    known = [run.seconds for run in runs if run.seconds is not None]
    return f"{fmean(known):.0f}" if known else None


def _seeds(runs: Sequence[Record]) -> str:
    if not runs:
        return "not run"
    return f"last epoch, seed{'s' * (len(runs) > 1)} " + ", ".join(str(r.seed) for r in runs)


def _ranking(results: Results) -> list[str]:
    """The rows of a search, best first: metrics on the held-out classes at the last epoch."""
    columns = _columns(results)
    lines: list[tuple[float, list[object]]] = []
    for row in results.table.rows:
        runs = results.runs_of[row.name]
        if not runs:
            continue
        found = [sample(runs, metric, **of) for metric, of in columns.values()]
        shown = [None if figures is None else f"{figures.mean:.2f}" for figures in found]
        changes = ", ".join(f"{key} {value}" for key, value in row.changes.items())
        seconds = _mean_seconds(runs)
        cells: list[object] = [row.name, *shown, len(runs), seconds, changes or "none"]
        lines.append((-math.inf if found[0] is None else found[0].mean, cells))
    ranked = sorted(lines, key=lambda line: line[0], reverse=True)
    part = _values(100 * run.recipe["evaluation"]["held_out"] for run in results.runs)
    absent = ", ".join(name for name, runs in results.runs_of.items() if not runs)
    return [
        grid(["row", *columns, "seeds", "s", "changes"], (cells for _, cells in ranked)),
        f"Percent on the held-out {part} % of the training classes at the last epoch, mean over "
        "the seeds, best first; s is seconds of training.",
        absent and f"Rows without a run here: {absent}.",
    ]


def _findings(results: Results) -> list[str]:
    lines, tested = [], 0
    for claim in results.table.claims:
        found = examine(claim, results)
        tested += len(found.seeds) > 1
        published = None if found.published is None else f"{found.published:+.2f}"
        ours = None if found.difference is None else f"{found.difference:+.2f}"
        if found.noise is not None:
            ours = f"{ours} ± {found.noise:.2f}"
        cells = [claim.metric, published, ours, len(found.seeds), found.verdict]
        lines.append([f"{claim.better} above {claim.worse}", *cells])
    caption = "Differences in points at the last epoch, over the seeds that both rows have. "
    if tested:
        caption += (
            "± is the 95 % confidence interval (Welch's t-test); a difference whose interval "
            f"includes 0 is within the noise. {tested} claim{'s' * (tested > 1)} tested; "
            "where there is no difference, one in twenty passes by chance."
        )
    else:
        caption += "No claim is tested: that takes two seeds that both rows have."
    return [grid(["claim", "metric", "published", "ours", "seeds", "verdict"], lines), caption]


def _during_training(results: Results) -> list[str]:
    curves = {name: dict(curve(runs, "epoch")) for name, runs in results.runs_of.items()}
    taken = sorted({int(epoch) for points in curves.values() for epoch in points})
    shown = [e for e in taken if e in (1, 2, 5, 10, 20, 40) or e == taken[-1]]
    lines = [
        [name, *(f"{points[e]:.1f}" if e in points else None for e in shown)]
        for name, points in curves.items()
    ]
    heads = ["", *(f"epoch {epoch}" for epoch in shown)]
    return [grid(heads, lines), "Recall@1 on the test set in percent, mean over the seeds."]


def _convergence(results: Results) -> list[str]:
    """How soon each row comes near to the best: fast convergence as a figure."""
    final = [sample(runs, "recall@1") for runs in results.runs_of.values()]
    target = _NEAR * max((s.mean for s in final if s is not None), default=0.0)
    reason = why_no_seconds(results)
    keys = {"epoch": "epochs"} | ({} if reason else {"seconds": "seconds of training"})
    lines = []
    for name, runs in results.runs_of.items():
        cells = []
        for key in keys:
            reached = next((x for x, recall in curve(runs, key) if recall >= target), None)
            never = "not reached" if runs else None
            cells.append(never if reached is None else f"{reached:.0f}")
        lines.append([name, *cells])
    caption = (
        f"Until the mean recall@1 over the seeds reaches {target:.1f} % on the test set, "
        f"{100 * _NEAR:.0f} % of the best row's at the last epoch."
    )
    caption += f" Seconds are neither drawn nor compared: {reason}." if reason else ""
    return [grid(["", *keys.values()], lines), caption]


def _pictures(results: Results, folder: str) -> list[str]:
    return [f"![{about}]({folder}{name})" for name, about in picture_names(results).items()]


def _setting(results: Results, selected: Sequence[Row] | None) -> list[str]:
    """A table of what was run, and a sentence about what was published."""
    runs, everything = results.runs, results.everything

    def of(section: str, key: str) -> str:
        return _values(record.recipe[section][key] for record in runs)

    dates = _dates(results)
    rows = {
        "data": _data(results),
        "network": f"{of('model', 'backbone')}, {of('model', 'pooling')} pooling, "
        f"{_values(map(_dimensions, runs))}; weights: {_values(map(_weights, runs), _MISSING)}",
        "images": f"crop {of('model', 'image_size')} of {of('model', 'resize')}",
        "batch": f"{of('data', 'batch_size')}, {of('data', 'sampler')}",
        "optimiser": f"{of('optimizer', 'name')}, learning rate {of('optimizer', 'lr')}, "
        f"proxies × {of('optimizer', 'proxy_multiplier')}",
        "epochs": _epochs(results),
        "precision": of("training", "precision"),
        "protocol": "last epoch, on held-out training classes; the test set is not used"
        if results.table.protocol == "held_out"
        else "last epoch; the test set is evaluated during training for the curve alone",
        "seeds": ", ".join(map(str, results.seeds)),
        "device": _values(record.device for record in everything),
        "concurrent runs": _values((record.parallel for record in everything), _MISSING),
        "versions": _versions(results),
        "date": dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        "command": f"`{_command(results, selected)}`",
    }
    published = results.table.published
    sentence = f"Published with {published.backbone}; {published.protocol}. {published.note}"
    theirs = sentence.rstrip() if published.backbone else published.note
    return [grid(["what was run", ""], rows.items()), theirs]


def _data(results: Results) -> str:
    """Which images, how many of them, and what the runs note about them."""
    sets = dict.fromkeys(
        f"{list_datasets()[record.recipe['data']['dataset']].title}: {_images(record)}"
        for record in results.everything
    )
    notes = list(dict.fromkeys(n.rstrip(".") for r in results.everything for n in r.notes))
    more = len(notes) - _NOTES_SHOWN
    rest = [f"and {more} more note{'s' * (more > 1)} in runs.jsonl"] if more > 0 else []
    return "; ".join([*sets, *notes[:_NOTES_SHOWN], *rest])


def _images(record: Record) -> str:
    if record.images is None:
        return f"number of images {_MISSING}"
    train, test = (spaced(record.images[k]) for k in ("train", "test"))
    return f"{train} training, {test} test images"


def _dimensions(record: Record) -> str:
    dim, reduced = record.recipe["model"]["dim"], record.recipe["model"]["pca_dim"]
    return f"{reduced} dimensions (PCA of {dim})" if reduced else f"{dim} dimensions"


def _weights(record: Record) -> str | None:
    origin, digest = record.weights["origin"], record.weights["sha256"]
    return f"{origin} (sha256 {digest[:10]}…)" if digest else origin


def _dates(results: Results) -> list[str]:
    return sorted(record.environment["started"][:10] for record in results.everything)


def _versions(results: Results) -> str:
    environments = [record.environment for record in results.everything]
    versions = {"Python": [e["python"] for e in environments]}
    for name in ("proximetry", "torch", "timm", "numpy"):
        versions[name] = [e["packages"].get(name) for e in environments]
    if any(record.device != "CPU" for record in results.everything):
        versions["CUDA"] = [e["cuda"] for e in environments]
    commits = {
        e["git"]["commit"][:10] + (" with changes" if e["git"]["changed"] else "")
        for e in environments
        if e["git"]
    }
    return ", ".join(
        [
            *(f"{k} {_values(found, _MISSING)}" for k, found in versions.items()),
            *([f"code at {', '.join(sorted(commits))}"] if commits else []),
        ]
    )


def _epochs(results: Results) -> str:
    """How many epochs were run, and of how many if there should be more or less."""
    ran, wanted = _epochs_of_runs(results)
    shown = _values(sorted(ran))
    if ran == wanted:
        return f"{shown} epochs"
    published = results.table.published.epochs
    of = f"published {published}" if published else f"table's {_values(sorted(wanted))}"
    return f"{shown} of the {of} epochs"


def _epochs_of_runs(results: Results) -> tuple[list[int], list[int]]:
    """The epochs of each run, and those of its row; auto is as many as were run."""
    table = results.table
    ran = [record.recipe["training"]["epochs"] for record in results.runs]
    said = [table.epochs(table.row(record.row)) for record in results.runs]
    return ran, [n if isinstance(n, int) else own for own, n in zip(ran, said, strict=True)]


def _command(results: Results, selected: Sequence[Row] | None) -> str:
    """The command that makes these runs again; ``selected`` as it was asked for, if it was."""
    first = results.runs[0]
    rows = results.selected() if selected is None else selected
    return command_for(
        results.table, first.row, results.seeds, first.recipe, rows, first.epochs_given
    )


# Keys of the model that no published setting has, and what a page says of their values.
_OPTIONS = {
    "drop_path": "Stochastic depth: in training the last block of the network is dropped with "
    "probability {}, those before it with less",
    "flip_tta": "Flip test-time augmentation",
    "tta_crops": "Test images are also seen by their centre alone, {} of the sides, enlarged to "
    "the same size, and the features averaged",
}


def _differences(results: Results) -> list[str]:
    """How the runs differ from what was published, a sentence each."""
    table, recipes = results.table, [Recipe.load(record.recipe) for record in results.runs]
    found, theirs = [], table.published.backbone
    if theirs:
        found.append(f"Network: {_values(r.model.backbone for r in recipes)} here, {theirs} there.")
    ran, wanted = _epochs_of_runs(results)
    if ran != wanted:
        ends = [(r.schedule, r.training.epochs) for r in recipes]
        drops = _values(at for how, end in ends for at in drop_epochs(how, end) if at < end)
        after = f" (here after {drops})" if drops else ""
        found.append(
            f"{_epochs(results)}: learning-rate drops{after}, warm-up and evaluation interval "
            "scale with the number of epochs, rounded to whole epochs, at least one."
        )
    precisions = sorted({r.training.precision for r in recipes} - {"float32"})
    if precisions:
        found.append(f"The network runs in {', '.join(precisions)}; proxies and loss are float32.")
    sides = _values(r.data.short_side or r.model.resize for r in recipes)
    resize, crop = (_values(getattr(r.model, k) for r in recipes) for k in ("resize", "image_size"))
    scaled = _values("both sides" if r.model.squash else "short side" for r in recipes)
    found += [
        f"Training crops are cut from images scaled to a short side of {sides}.",
        f"Test images: {scaled} to {resize}, centre crop {crop}.",
    ]
    shapes = {r.data.crop_ratio for r in recipes} - {DataConfig().crop_ratio}
    found += [
        f"Training crops are {low:g} to {high:g} times as wide as high before they are scaled to a "
        "square."
        for low, high in sorted(shapes)
    ]
    if any((r.data.short_side or math.inf) < (r.model.resize or 0) for r in recipes):
        found.append("Test images are scaled up to that from the short side before.")
    for key, sentence in _OPTIONS.items():
        values = [getattr(r.model, key) for r in recipes]
        rest = "" if all(values) else ", unless the row says otherwise"
        for value in dict.fromkeys(filter(None, values)):
            said = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            found.append(sentence.format(said) + f"{rest}.")
    reduced = dict.fromkeys(
        (r.model.dim, r.model.pca_dim, r.model.whitening) for r in recipes if r.model.pca_dim
    )
    for dim, pca_dim, power in reduced:
        divided = f", each component divided by its standard deviation to the power {power:g}"
        found.append(
            f"A {dim}-d embedding is trained and reduced to {pca_dim}-d by PCA (fitted on training "
            f"images){divided if power else ''}."
        )
    return [*found, *table.differences]


def _values(many: Iterable[Any], missing: str = "the network's own") -> str:
    """What all share, or all there is; ``missing`` stands for None."""
    known = (missing if value is None else value for value in many)
    shown = (f"{value:g}" if isinstance(value, float) else str(value) for value in known)
    return ", ".join(dict.fromkeys(shown))
