"""The page of a table, made from its JSON files and nothing else."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from proximetry.data import list_datasets
from proximetry.reproduce.figures import curve, picture_names, time_to, why_no_seconds
from proximetry.reproduce.plan import command_for, drops, make_run
from proximetry.reproduce.records import Record, Results
from proximetry.reproduce.statistics import Finding, Sample, examine, sample
from proximetry.training.recipe import Recipe

NOTHING = "—"
NOT_RECORDED = "not recorded"
_NEAR = 0.95  # of the best final recall: what counts as having arrived
_PACKAGES = ("proximetry", "torch", "timm", "numpy")
_NOTES_SHOWN = 3
FLIP_VIEW = "flip TTA"


def page(results: Results, seeds: Sequence[int] = (), selection: bool | None = None) -> str:
    """The whole page.

    ``seeds`` and ``selection`` say what was asked for, done or not; without them it is the seeds
    that are there, and what the table says.
    """
    table = results.table
    parts = [f"# {table.title}", table.source]
    if not results.runs:
        parts.append("No run of this table is done yet.")
        return _joined(parts)
    parts += [_setting(results, selection), "## Results"]
    if table.protocol == "held_out":
        return _joined([*parts, *_ranking(results)])
    parts += _figures(results, seeds, selection)
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
        f"Published: {table.published.backbone}, {table.published.protocol}.",
        table.published.note,
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
        return "| " + " | ".join(NOTHING if c is None else str(c) for c in cells) + " |"

    names = list(columns)
    return "\n".join([line(names), "|" + "---|" * len(names), *map(line, lines)])


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, parts)) + "\n"


def _columns(results: Results) -> dict[str, tuple[str, int | None]]:
    """Metric and dimension of each column, by its heading."""
    table = results.table
    first = table.metrics[0]
    columns: dict[str, tuple[str, int | None]] = {name: (name, None) for name in table.metrics}
    return columns | {f"{first}, first {dim} dimensions": (first, dim) for dim in table.dims}


def _figures(results: Results, seeds: Sequence[int], selection: bool | None) -> list[str]:
    """The table itself, what its lines mean, and what is missing."""
    table, columns = results.table, _columns(results)
    lines: list[list[object]] = []
    for row in table.rows:
        runs = results.runs_of[row.name]
        ours = [sample(runs, metric, None, dim) for metric, dim in columns.values()]
        lines.append([row.name, f"ours, {_seeds(runs)}", *ours])
        found = results.selection.get(row.name)
        if found is not None and found.selected_epoch is not None:
            epoch = found.selected_epoch
            cells = [sample(runs, metric, epoch, dim) for metric, dim in columns.values()]
            lines.append(["", f"ours, epoch {epoch}, selected on held-out classes", *cells])
        if row.published:
            theirs = [row.published.get(name) for name in columns]
            shown = [None if value is None else f"{value:.1f}" for value in theirs]
            lines.append(["", f"published, {table.published.backbone}", *shown])
    words = ["Percent; ours: mean ± sample standard deviation over the seeds."]
    words += [_how_selected(results)] if results.selection else []
    parts = [grid(["", "", *columns], lines), _below(results, *words)]
    missing = results.missing(seeds, table.selection if selection is None else selection)
    if missing:
        parts.append(f"**Not complete.** Still missing: {', '.join(missing)}.")
    return parts


def _seeds(runs: Sequence[Record]) -> str:
    if not runs:
        return "not run"
    return f"last epoch, seed{'s' * (len(runs) > 1)} " + ", ".join(str(r.seed) for r in runs)


def _how_selected(results: Results) -> str:
    e = next(iter(results.selection.values())).recipe["evaluation"]
    return (
        f"For the selected epoch one more run per row holds out {100 * e['held_out']:.0f} % of the "
        f"training classes; the epoch with its best {e['select_by']} on those is selected, and the "
        "figures are those of the runs on all training classes after that many epochs. The test "
        "set is not used for selection."
    )


def _ranking(results: Results) -> list[str]:
    """The rows of a search, best first: metrics on the held-out classes at the last epoch."""
    table, columns = results.table, _columns(results)
    first = table.metrics[0]
    views = [view_name(crop, side) for crop, side in table.views]
    views += [FLIP_VIEW] if views else []
    lines: list[tuple[float, list[object]]] = []
    for row in table.rows:
        runs = results.runs_of[row.name]
        found = [sample(runs, metric, None, dim) for metric, dim in columns.values()]
        if found[0] is None:
            continue
        mean = found[0].mean
        found += [_view_sample(runs, view, first) for view in views]
        shown = [None if figures is None else f"{figures.mean:.2f}" for figures in found]
        seconds = fmean(run.seconds or 0.0 for run in runs)
        changes = ", ".join(f"{key} {value}" for key, value in row.changes.items())
        rest = [len(runs), f"{seconds:.0f}", changes or "none"]
        lines.append((mean, [row.name, *shown, *rest]))
    heads = ["row", *columns, *(f"{first}, {view}" for view in views), "seeds", "s", "changes"]
    ranked = sorted(lines, key=lambda line: line[0], reverse=True)
    part = _values(100 * run.recipe["evaluation"]["held_out"] for run in results.runs)
    words = (
        f"Percent on the held-out {part} % of the training classes at the last epoch, mean over "
        "the seeds, best first; s is seconds of training."
    )
    return [grid(heads, (cells for _, cells in ranked)), _below(results, words)]


def view_name(crop: int, side: int) -> str:
    """How a view is called: the crop, and the short side that it is cut from."""
    return f"{crop} of {side}"


def _view_sample(runs: Sequence[Record], view: str, metric: str) -> Sample | None:
    found = [run.views[view] for run in runs if run.views and view in run.views]
    return Sample(tuple(100 * metrics[metric] for metrics in found)) if found else None


def _findings(results: Results) -> list[str]:
    lines, tested = [], 0
    for claim in results.table.claims:
        found = examine(claim, results.table, results.runs_of)
        tested += found.tested
        published = None if found.published is None else f"{found.published:+.2f}"
        cells = [claim.metric, published, _ours(found), len(found.seeds), found.verdict]
        lines.append([f"{claim.better} above {claim.worse}", *cells])
    words = ["Differences in points at the last epoch, over the seeds that both rows have."]
    if tested:
        words.append(
            "± is what chance alone reaches in 19 of 20 cases (Welch's t, two-sided 5 %); a "
            "difference of no more is within the noise. "
            f"{tested} claim{'s' * (tested > 1)} tested: of differences that are none, one in "
            "twenty passes by chance."
        )
    else:
        words.append("No claim is tested: that takes two seeds that both rows have.")
    heads = ["claim", "in", "published", "ours", "seeds each", ""]
    return [grid(heads, lines), _below(results, *words)]


def _ours(found: Finding) -> str | None:
    if found.difference is None:
        return None
    noise = "" if found.noise is None else f" ± {found.noise:.2f}"
    return f"{found.difference:+.2f}{noise}"


def _during_training(results: Results) -> list[str]:
    curves = {name: dict(curve(runs, "epoch")) for name, runs in results.runs_of.items()}
    taken = sorted({int(epoch) for points in curves.values() for epoch in points})
    shown = [e for e in taken if e in (1, 2, 5, 10, 20, 40) or e == taken[-1]]
    lines = [
        [name, *(f"{points[e]:.1f}" if e in points else None for e in shown)]
        for name, points in curves.items()
    ]
    heads = ["", *(f"epoch {epoch}" for epoch in shown)]
    return [grid(heads, lines), _below(results, "Recall@1 on the test set in percent.")]


def _convergence(results: Results) -> list[str]:
    """How soon each row comes near to the best: fast convergence as a figure."""
    final = {name: sample(runs, "recall@1") for name, runs in results.runs_of.items()}
    target = _NEAR * max((s.mean for s in final.values() if s is not None), default=0.0)
    reason = why_no_seconds(results.runs_of)
    keys = {"epoch": "epochs"} | ({} if reason else {"seconds": "seconds of training"})
    lines = []
    for name, runs in results.runs_of.items():
        reached = [time_to(runs, target, key) for key in keys]
        never = "not reached" if runs else NOTHING
        lines.append([name, *(never if x is None else f"{x:.0f}" for x in reached)])
    words = [
        f"Until recall@1 on the test set is {target:.1f} %, which is {100 * _NEAR:.0f} % of the "
        "best row's at its last epoch; mean curve over the seeds, where it was evaluated."
    ]
    words += [f"Seconds are neither drawn nor compared: {reason}."] if reason else []
    return [grid(["", *keys.values()], lines), _below(results, *words)]


def _pictures(results: Results, folder: str) -> list[str]:
    names = picture_names(results.table.figure, results.runs_of)
    return [
        part
        for name, about in names.items()
        for part in (f"![{about}]({folder}{name})", _below(results))
    ]


def _below(results: Results, *words: str) -> str:
    """The caption of a table: what its figures mean, and what is to be known about the data."""
    notes = _few_notes(results)
    return " ".join([*words, *([f"Data: {'; '.join(notes)}."] if notes else [])])


def _few_notes(results: Results) -> list[str]:
    notes = [note.rstrip(".") for note in results.notes]
    more = len(notes) - _NOTES_SHOWN
    last = [f"and {more} more notes in the JSON files"] if more > 0 else []
    return [*notes[:_NOTES_SHOWN], *last]


def _setting(results: Results, selection: bool | None) -> str:
    """A table of what was run, and a sentence about what was published."""
    runs, everything = results.runs, results.everything

    def of(section: str, key: str) -> str:
        return _values(record.recipe[section][key] for record in runs)

    dates = _dates(results)
    rows = {
        "data": _data(results),
        "network": f"{of('model', 'backbone')}, {of('model', 'pooling')} pooling, "
        f"{_values(map(_dimensions, runs))}; weights: {_values(map(_weights, runs))}",
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
        "concurrent runs": _values(record.parallel or NOT_RECORDED for record in everything),
        "versions": _versions(results),
        "date": dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        "command": f"`{_command(results, selection)}`",
    }
    published = results.table.published
    words = [published.note]
    if published.backbone:
        words.insert(0, f"Published with {published.backbone}; {published.protocol}.")
    parts = [grid(["what was run", ""], rows.items()), " ".join(filter(None, words))]
    return "\n\n".join(filter(None, parts))


def _data(results: Results) -> str:
    """Which images, how many of them, and what is to be known about them."""
    title = list_datasets()[results.table.dataset].title
    counts = _values(_images(record) for record in results.everything)
    return "; ".join([f"{title}: {counts}", *_few_notes(results)])


def _images(record: Record) -> str:
    if record.images is None:
        return f"numbers of images {NOT_RECORDED}"
    train, test = (f"{record.images[k]:,}".replace(",", " ") for k in ("train", "test"))
    return f"{train} training, {test} test images"


def _dimensions(record: Record) -> str:
    dim, reduced = record.recipe["model"]["dim"], record.recipe["model"]["pca_dim"]
    return f"{reduced} dimensions (PCA of {dim})" if reduced else f"{dim} dimensions"


def _weights(record: Record) -> str:
    weights = record.weights
    digest = (weights.get("sha256") or "")[:10]
    return str(weights.get("origin", NOT_RECORDED)) + (f" (sha256 {digest}…)" if digest else "")


def _dates(results: Results) -> list[str]:
    return sorted(record.environment["started"][:10] for record in results.everything)


def _versions(results: Results) -> str:
    environments = [record.environment for record in results.everything]

    def of(found: Iterable[Any]) -> str:
        return _values(version or NOT_RECORDED for version in found)

    versions = [f"Python {of(e['python'] for e in environments)}"]
    for name in _PACKAGES:
        known = [e["packages"].get(name) for e in environments]
        if any(known):
            versions.append(f"{name} {of(known)}")
        elif name == "proximetry":
            versions.append(f"proximetry: version {NOT_RECORDED}")
    if any(record.device != "CPU" for record in results.everything):
        versions.append(f"CUDA {of(e['cuda'] for e in environments)}")
    commits = sorted({_commit(e["git"]) for e in environments if e["git"]})
    return ", ".join(versions + ([f"code at {', '.join(commits)}"] if commits else []))


def _commit(git: dict[str, Any]) -> str:
    return str(git["commit"])[:10] + (" with changes" if git["changed"] else "")


def _epochs(results: Results) -> str:
    """How many epochs were run, of how many."""
    table = results.table
    ran = _values(sorted({record.recipe["training"]["epochs"] for record in results.runs}))
    if not _scaled(results):
        return f"{ran} epochs"
    if table.published.epochs is None:
        wanted = sorted({table.epochs(table.row(record.row)) for record in results.runs})
        return f"{ran} of the table's {_values(wanted)} epochs"
    return f"{ran} of the published {table.published.epochs} epochs"


def _scaled(results: Results) -> bool:
    table = results.table
    return any(
        record.recipe["training"]["epochs"] != table.epochs(table.row(record.row))
        for record in results.runs
    )


def _command(results: Results, selection: bool | None) -> str:
    """The command that makes these runs again; ``selection`` as it was asked for, if it was."""
    first = results.runs[0]
    selected = bool(results.selection) if selection is None else selection
    return command_for(results.table, first.row, results.seeds, first.recipe, selected)


def _differences(results: Results) -> list[str]:
    """How the runs differ from what was published, a sentence each."""
    table, recipes = results.table, [Recipe.load(record.recipe) for record in results.runs]
    found = [
        f"Network: {_values(r.model.backbone for r in recipes)} here, {table.published.backbone} "
        "there."
    ]
    if _scaled(results):
        found.append(
            f"{_epochs(results)}: learning-rate drops and evaluation interval scale with the "
            f"number of epochs, rounded to whole epochs; the warm-up stays.{_lost(results)}"
        )
    precisions = sorted({r.training.precision for r in recipes} - {"float32"})
    if precisions:
        found.append(f"The network runs in {', '.join(precisions)}; proxies and loss are float32.")
    sides = _values(r.data.short_side or r.model.resize for r in recipes)
    resize, crop = (_values(getattr(r.model, k) for r in recipes) for k in ("resize", "image_size"))
    found += [
        f"Training crops are cut from images scaled to a short side of {sides}.",
        f"Test images: short side to {resize}, centre crop {crop}.",
    ]
    if any(_upscaled(r) for r in recipes):
        found.append("Test images are scaled up to that from the short side before.")
    if any(r.model.flip_tta for r in recipes):
        rest = "" if all(r.model.flip_tta for r in recipes) else ", unless the row says otherwise"
        found.append(f"Flip test-time augmentation{rest}.")
    reduced = dict.fromkeys((r.model.dim, r.model.pca_dim) for r in recipes if r.model.pca_dim)
    found += [
        f"A {dim}-d embedding is trained and reduced to {pca_dim}-d by PCA (fitted on training "
        "images)."
        for dim, pca_dim in reduced
    ]
    return [*found, *table.differences]


def _upscaled(recipe: Recipe) -> bool:
    stored, seen = recipe.data.short_side, recipe.model.resize
    return stored is not None and seen is not None and stored < seen


def _lost(results: Results) -> str:
    """Say so where learning-rate drops came to lie on the same epoch, or past the end."""
    table = results.table
    lost = 0
    for record in results.runs:
        whole = make_run(table, table.row(record.row), record.seed, "full").recipe
        lost = max(lost, len(drops(whole)) - len(drops(Recipe.load(record.recipe))))
    return f" {lost} of the drops coincide with others or with the end, and are lost." * (lost > 0)


def _values(many: Iterable[Any]) -> str:
    """What all share, or all there is."""
    return ", ".join(dict.fromkeys(map(_shown, many)))


def _shown(value: Any) -> str:
    if value is None:
        return "the network's own"
    return f"{value:g}" if isinstance(value, float) else str(value)
