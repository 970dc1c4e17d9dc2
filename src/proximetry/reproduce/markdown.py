"""The page of a table, made from its JSON files and nothing else."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from proximetry.reproduce.figures import curve, picture_names
from proximetry.reproduce.plan import command_for, run_id
from proximetry.reproduce.records import Record
from proximetry.reproduce.statistics import ONE_SEED_NOISE, Finding, examine, sample
from proximetry.reproduce.tables import Table

NOTHING = "—"


@dataclass(frozen=True)
class Results:
    """The runs of a table that are there, in its order.

    Attributes:
        full: the runs on all training classes, by row.
        selection: the runs that chose the number of epochs, by row.
    """

    table: Table
    full: dict[str, Sequence[Record]]
    selection: dict[str, Record]

    @classmethod
    def of(cls, table: Table, records: dict[str, Record]) -> "Results":
        """Sort records into rows, by seed."""
        known = sorted(records.values(), key=lambda record: record.seed)
        full: dict[str, Sequence[Record]] = {
            row.name: [r for r in known if r.row == row.name and r.kind == "full"]
            for row in table.rows
        }
        return cls(table, full, {r.row: r for r in known if r.kind == "selection"})

    @property
    def runs(self) -> list[Record]:
        """The full runs, row by row."""
        return [record for records in self.full.values() for record in records]

    @property
    def everything(self) -> list[Record]:
        """All runs."""
        return [*self.runs, *self.selection.values()]

    @property
    def seeds(self) -> list[int]:
        """All seeds of full runs."""
        return sorted({record.seed for record in self.runs})

    def missing(self, seeds: Iterable[int], selection: bool) -> list[str]:
        """Names of the runs that a complete table would also have."""
        there = {record.id for record in self.everything}
        wanted = sorted({*self.seeds, *seeds})
        names = [run_id(row.slug, seed, "full") for seed in wanted for row in self.table.rows]
        if selection or self.selection:
            names += [run_id(row.slug, 0, "selection") for row in self.table.rows]
        return [name for name in names if name not in there]


def page(results: Results, seeds: Sequence[int] = (), selection: bool = False) -> str:
    """The whole page; ``seeds`` and ``selection`` say what was asked for, done or not."""
    table = results.table
    parts = [f"# {table.title}", f"{table.source}"]
    if not results.runs:
        parts.append("No run of this table is done yet.")
        return "\n\n".join(parts) + "\n"
    parts += [_setting(results), "## Last epoch", _last_epoch(results)]
    missing = results.missing(seeds, selection)
    if missing:
        parts.append(f"**Not complete.** Still missing: {', '.join(missing)}.")
    parts += _notes(results)
    if results.selection:
        parts += ["## Epoch chosen on held-out classes", _selected(results)]
    if table.claims:
        parts += ["## What holds", _findings(results)]
    if table.figure is not None and table.figure.kind == "curves":
        parts += ["## On the way", _on_the_way(results)]
    parts += [f"![{about}]({name})" for name, about in picture_names(table.figure).items()]
    parts += ["## Differences from the published setting", _bullets(_differences(results))]
    return "\n\n".join(parts) + "\n"


def overview(results: Results, folder: str) -> str:
    """A section about a table for a page about several; ``folder`` is where its own page lies."""
    table = results.table
    record = results.runs[0]
    seeds = len(results.seeds)
    dates = sorted(r.environment["started"][:10] for r in results.everything)
    told = (
        f"{table.source} Ours: {_values([r.recipe['model']['backbone'] for r in results.runs])}, "
        f"{_epochs(results)}, {seeds} seed{'s' * (seeds > 1)}, last epoch, {record.card}, "
        f"{dates[-1]}; `{_command(results)}`. Published: {table.published.backbone}, "
        f"{table.published.protocol}. [All figures, versions and differences]({folder}/README.md)."
    )
    parts = [f"## {table.title}", told, _last_epoch(results)]
    missing = results.missing((), False)
    if missing:
        parts.append(f"**Not complete.** Still missing: {', '.join(missing)}.")
    parts += _notes(results)
    if results.selection:
        parts.append(_selected(results))
    if table.claims:
        parts.append(_findings(results))
    names = picture_names(table.figure).items()
    parts += [f"![{about}]({folder}/{name})" for name, about in names]
    return "\n\n".join(parts) + "\n"


def _notes(results: Results) -> list[str]:
    notes = list(dict.fromkeys(note for record in results.everything for note in record.notes))
    return ["The runs note:\n\n" + _bullets(notes)] if notes else []


def _setting(results: Results) -> str:
    table, runs = results.table, results.runs

    def of(key: str) -> str:
        return _values([_get(record.recipe, key) for record in runs])

    environments = [record.environment for record in results.everything]
    packages = ("proximetry", "torch", "timm", "numpy")
    versions = [f"Python {_values([e['python'] for e in environments])}"]
    for name in packages:
        known = [e["packages"][name] for e in environments if e["packages"].get(name)]
        versions += [f"{name} {_values(known)}"] if known else []
    if any(record.card != "CPU" for record in results.everything):
        versions.append(f"CUDA {_values([e['cuda'] for e in environments])}")
    commits = sorted({_commit(e["git"]) for e in environments if e["git"]})
    if commits:
        versions.append(f"code at {', '.join(commits)}")
    dates = sorted(e["started"][:10] for e in environments)
    rows = {
        "data": _values([record.recipe["data"]["dataset"] for record in runs]),
        "network": f"{of('model.backbone')}, {of('model.pooling')} pooling, {of('model.dim')} "
        f"numbers; weights: {_values([_weights(record) for record in runs])}",
        "images": f"crop {of('model.image_size')} of {of('model.resize')}",
        "batch": f"{of('data.batch_size')}, {of('data.sampler')}",
        "optimiser": f"{of('optimizer.name')}, learning rate {of('optimizer.lr')}, proxies × "
        f"{of('optimizer.proxy_multiplier')}",
        "epochs": _epochs(results),
        "precision": of("training.precision"),
        "protocol": "last epoch; the test set is looked at on the way for the curve alone",
        "seeds": ", ".join(map(str, results.seeds)),
        "card": _values([record.card for record in results.everything]),
        "versions": ", ".join(versions),
        "date": dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        "command": f"`{_command(results)}`",
    }
    lines = ["| what was run | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in rows.items()]
    published = table.published
    words = [f"Published with {published.backbone}; {published.protocol}."]
    return "\n".join(lines) + "\n\n" + " ".join([*words, published.note]).strip()


def _weights(record: Record) -> str:
    weights = record.weights
    digest = (weights.get("sha256") or "")[:10]
    return str(weights["origin"]) + (f" (sha256 {digest}…)" if digest else "")


def _commit(git: dict[str, Any]) -> str:
    return str(git["commit"])[:10] + (" with changes" if git["changed"] else "")


def _epochs(results: Results) -> str:
    published = {_published_epochs(results.table, record.row) for record in results.runs}
    ran = {record.recipe["training"]["epochs"] for record in results.runs}
    if ran == published:
        return _values(sorted(ran))
    return f"{_values(sorted(ran))} of the published {_values(sorted(published))} epochs"


def _published_epochs(table: Table, row: str) -> int:
    values = table.recipe_values(table.row(row))
    return int(values.get("training", {}).get("epochs", 60))


def _command(results: Results) -> str:
    first = results.runs[0].recipe
    epochs = first["training"]["epochs"]
    scaled = epochs != _published_epochs(results.table, results.runs[0].row)
    model = first["model"]
    return command_for(
        results.table,
        results.seeds,
        model["backbone"],
        model["weights"],
        epochs if scaled else None,
    )


def _last_epoch(results: Results) -> str:
    table = results.table
    lines = _head(["", ""], table.metrics)
    for row in table.rows:
        runs = results.full[row.name]
        ours = [sample(runs, metric) for metric in table.metrics]
        lines.append(_line([row.name, f"ours, {_seeds(runs)}"], ours))
        if any(other.published for other in table.rows):  # else the paper has curves alone
            theirs = [_number(row.published, metric) for metric in table.metrics]
            lines.append(_line(["", f"published, {table.published.backbone}"], theirs))
    return "\n".join(lines) + (
        "\n\nPercent; ours at the last epoch, mean ± sample standard deviation over the seeds."
    )


def _selected(results: Results) -> str:
    table = results.table
    lines = _head(["", "epoch"], table.metrics)
    for row in table.rows:
        found = results.selection.get(row.name)
        epoch = None if found is None else found.chosen_epoch
        runs = results.full[row.name] if epoch is not None else []
        cells = [sample(runs, metric, epoch) for metric in table.metrics]
        lines.append(_line([row.name, NOTHING if epoch is None else str(epoch)], cells))
    e = next(iter(results.selection.values())).recipe["evaluation"]
    return "\n".join(lines) + (
        f"\n\nOne more run per row leaves {100 * e['held_out']:.0f} % of the training classes out, "
        f"and the epoch with its best {e['metric']} on those is chosen. The figures are those of "
        "the runs above, which train on all training classes, after that many epochs. No test "
        "image has a say."
    )


def _findings(results: Results) -> str:
    lines = ["| claim | in | published | ours | |", "|---|---|---|---|---|"]
    for claim in results.table.claims:
        found = examine(claim, results.table, results.full)
        published = NOTHING if found.published is None else f"{found.published:+.1f}"
        name = f"{claim.better} above {claim.worse}"
        lines.append(
            f"| {name} | {claim.metric} | {published} | {_ours(found)} | {found.verdict} |"
        )
    return "\n".join(lines) + (
        "\n\nDifferences in points, last epoch; ours ± the standard error of the difference where "
        "both rows have two seeds or more. A difference below two standard errors, or below "
        f"{ONE_SEED_NOISE} points with one seed, is within the noise."
    )


def _ours(found: Finding) -> str:
    if found.difference is None:
        return NOTHING
    error = "" if found.error is None else f" ± {found.error:.1f}"
    return f"{found.difference:+.1f}{error}"


def _on_the_way(results: Results) -> str:
    curves = {name: dict(curve(runs, "epoch")) for name, runs in results.full.items()}
    epochs = sorted({int(epoch) for points in curves.values() for epoch in points})
    shown = [e for e in epochs if e in (1, 2, 5, 10, 20, 40) or e == epochs[-1]]
    lines = _head([""], [f"epoch {epoch}" for epoch in shown])
    for name, points in curves.items():
        lines.append(_line([name], [f"{points[e]:.1f}" if e in points else None for e in shown]))
    return "\n".join(lines) + "\n\nRecall@1 on the test set in percent."


def _differences(results: Results) -> list[str]:
    table = results.table
    ours = _values([record.recipe["model"]["backbone"] for record in results.runs])
    first = [f"Network: {ours} here, {table.published.backbone} there."]
    epochs = _epochs(results)
    return [*first, *([f"{epochs}."] if "published" in epochs else []), *table.differences]


def _number(published: dict[str, float], metric: str) -> str | None:
    return f"{published[metric]:.1f}" if metric in published else None


def _seeds(runs: Sequence[Record]) -> str:
    return f"{len(runs)} seed" + ("" if len(runs) == 1 else "s")


def _head(first: Sequence[str], columns: Iterable[str]) -> list[str]:
    names = [*first, *columns]
    return ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]


def _line(first: Sequence[str], cells: Iterable[object]) -> str:
    return "| " + " | ".join([*first, *(NOTHING if c is None else str(c) for c in cells)]) + " |"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _values(values: Iterable[Any]) -> str:
    """What all share, or all there is."""
    return ", ".join(dict.fromkeys(map(_shown, values)))


def _shown(value: Any) -> str:
    if value is None:
        return "the network's own"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _get(values: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
