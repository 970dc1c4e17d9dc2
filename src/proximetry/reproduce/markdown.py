"""The page of a table, made from its JSON files and nothing else."""

from collections.abc import Iterable, Sequence

from proximetry.reproduce.figures import curve, picture_names, time_to, why_no_seconds
from proximetry.reproduce.grid import NOTHING, table_head, table_line
from proximetry.reproduce.records import Record
from proximetry.reproduce.results import Results
from proximetry.reproduce.setting import caption, command, differences, epochs, setting, values
from proximetry.reproduce.statistics import Finding, examine, sample

_NEAR = 0.95  # of the best final recall: what counts as having arrived


def page(results: Results, seeds: Sequence[int] = (), selection: bool | None = None) -> str:
    """The whole page.

    ``seeds`` and ``selection`` say what was asked for, done or not; without them it is the seeds
    that are there, and what the table says.
    """
    table = results.table
    parts = [f"# {table.title}", f"{table.source}"]
    if not results.runs:
        parts.append("No run of this table is done yet.")
        return "\n\n".join(parts) + "\n"
    parts += [setting(results, selection), "## Results", *_figures(results, seeds, selection)]
    if table.claims:
        parts += ["## What holds", *_findings(results)]
    if table.figure is not None and table.figure.kind == "curves":
        parts += ["## On the way", *_on_the_way(results), *_convergence(results)]
    parts += _pictures(results, "")
    parts += ["## Differences from the published setting", _bullets(differences(results))]
    return "\n\n".join(parts) + "\n"


def overview(results: Results, folder: str) -> str:
    """A section about a table for a page about several; ``folder`` is where its own page lies."""
    table = results.table
    seeds = len(results.seeds)
    dates = sorted(r.environment["started"][:10] for r in results.everything)
    words = [
        table.source,
        f"Ours: {values(r.recipe['model']['backbone'] for r in results.runs)}, "
        f"{epochs(results)}, {seeds} seed{'s' * (seeds > 1)}, last epoch, "
        f"{values(r.card for r in results.runs)}, {dates[-1]}; `{command(results, None)}`.",
        f"Published: {table.published.backbone}, {table.published.protocol}.",
        table.published.note,
        f"[All figures, versions and differences]({folder}/README.md).",
    ]
    parts = [f"## {table.title}", " ".join(filter(None, words)), *_figures(results, (), None)]
    if table.claims:
        parts += _findings(results)
    if table.figure is not None and table.figure.kind == "curves":
        parts += _convergence(results)
    return "\n\n".join([*parts, *_pictures(results, f"{folder}/")]) + "\n"


def _figures(results: Results, seeds: Sequence[int], selection: bool | None) -> list[str]:
    """The table itself, what its lines mean, and what is missing."""
    table = results.table
    lines = table_head(["", "", *table.metrics])
    for row in table.rows:
        runs = results.full[row.name]
        ours = [sample(runs, metric) for metric in table.metrics]
        lines.append(table_line([row.name, f"ours, {_seeds(runs)}", *ours]))
        found = results.selection.get(row.name)
        if found is not None and found.chosen_epoch is not None:
            epoch = found.chosen_epoch
            cells = [sample(runs, metric, epoch) for metric in table.metrics]
            chosen = f"ours, epoch {epoch}, chosen on held-out classes"
            lines.append(table_line(["", chosen, *cells]))
        if row.published:
            theirs = [_number(row.published, metric) for metric in table.metrics]
            lines.append(table_line(["", f"published, {table.published.backbone}", *theirs]))
    words = ["Percent; ours: mean ± sample standard deviation over the seeds."]
    words += [_how_chosen(results)] if results.selection else []
    parts = ["\n".join(lines), _below(results, *words)]
    missing = results.missing(seeds, table.selection if selection is None else selection)
    if missing:
        parts.append(f"**Not complete.** Still missing: {', '.join(missing)}.")
    return parts


def _how_chosen(results: Results) -> str:
    e = next(iter(results.selection.values())).recipe["evaluation"]
    return (
        f"For the chosen epoch one more run per row leaves {100 * e['held_out']:.0f} % of the "
        f"training classes out; the epoch with its best {e['metric']} on those is chosen, and the "
        "figures are those of the runs on all training classes after that many epochs. No test "
        "image has a say."
    )


def _findings(results: Results) -> list[str]:
    lines = table_head(["claim", "in", "published", "ours", "seeds each", ""])
    judged = 0
    for claim in results.table.claims:
        found = examine(claim, results.table, results.full)
        judged += found.judged
        published = NOTHING if found.published is None else f"{found.published:+.2f}"
        cells = [claim.metric, published, _ours(found), len(found.seeds), found.verdict]
        lines.append(table_line([f"{claim.better} above {claim.worse}", *cells]))
    words = ["Differences in points at the last epoch, over the seeds that both rows have."]
    if judged:
        words.append(
            "± is what chance alone reaches in 19 of 20 cases (Welch's t, two-sided 5 %); a "
            "difference of no more is within the noise. "
            f"{judged} claim{'s' * (judged > 1)} tested: of differences that are none, one in "
            "twenty passes by chance."
        )
    else:
        words.append("No claim is tested: that takes two seeds that both rows have.")
    return ["\n".join(lines), _below(results, *words)]


def _ours(found: Finding) -> str:
    if found.difference is None:
        return NOTHING
    noise = "" if found.noise is None else f" ± {found.noise:.2f}"
    return f"{found.difference:+.2f}{noise}"


def _on_the_way(results: Results) -> list[str]:
    curves = {name: dict(curve(runs, "epoch")) for name, runs in results.full.items()}
    taken = sorted({int(epoch) for points in curves.values() for epoch in points})
    shown = [e for e in taken if e in (1, 2, 5, 10, 20, 40) or e == taken[-1]]
    lines = table_head(["", *(f"epoch {epoch}" for epoch in shown)])
    for name, points in curves.items():
        cells = [f"{points[e]:.1f}" if e in points else None for e in shown]
        lines.append(table_line([name, *cells]))
    return ["\n".join(lines), _below(results, "Recall@1 on the test set in percent.")]


def _convergence(results: Results) -> list[str]:
    """How soon each row comes near to the best: fast convergence as a figure."""
    final = {name: sample(runs, "recall@1") for name, runs in results.full.items()}
    target = _NEAR * max((s.mean for s in final.values() if s is not None), default=0.0)
    reason = why_no_seconds(results.full)
    lines = table_head(["", "epochs", *([] if reason else ["seconds of training"])])
    for name, runs in results.full.items():
        keys = ["epoch", *([] if reason else ["seconds"])]
        reached = [time_to(runs, target, key) for key in keys]
        never = "not reached" if runs else NOTHING
        lines.append(table_line([name, *(never if x is None else f"{x:.0f}" for x in reached)]))
    words = [
        f"Until recall@1 on the test set is {target:.1f} %, which is {100 * _NEAR:.0f} % of the "
        "best row's at its last epoch; mean curve over the seeds, where it was evaluated."
    ]
    words += [f"Seconds are neither drawn nor compared: {reason}."] if reason else []
    return ["\n".join(lines), _below(results, *words)]


def _pictures(results: Results, folder: str) -> list[str]:
    names = picture_names(results.table.figure, results.full)
    parts = []
    for name, about in names.items():
        parts += [f"![{about}]({folder}{name})", caption(results)]
    return [part for part in parts if part]


def _below(results: Results, *words: str) -> str:
    """The caption of a table: what its figures mean, and what is to be known about the data."""
    return " ".join(word for word in (*words, caption(results)) if word)


def _number(published: dict[str, float], metric: str) -> str | None:
    return f"{published[metric]:.1f}" if metric in published else None


def _seeds(runs: Sequence[Record]) -> str:
    if not runs:
        return "not run"
    return f"last epoch, seed{'s' * (len(runs) > 1)} " + ", ".join(str(r.seed) for r in runs)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
