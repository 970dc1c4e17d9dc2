"""Check that the committed results agree with their pages, tables, recipes and the README.

python -m benchmarks.check_results

It needs no data and trains nothing; it is part of `make lint`.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean

from benchmarks.results_page import (
    OF_TEST_IMAGES,
    PAGE,
    TOLERANCES,
    make_page,
    repeats,
    same_losses,
    spread,
)
from benchmarks.results_page import twins as find_twins
from benchmarks.studies import HOME, read_study, studies, study_page
from proximetry.recipe.auto import choose_epochs, keep_choices
from proximetry.recipe.loading import plain_values
from proximetry.recipe.schema import AUTO, Recipe
from proximetry.reproduce.plan import make_run, scale
from proximetry.reproduce.records import RUNS, Record, Results, check_same, read_runs
from proximetry.reproduce.table import (
    ReproduceError,
    ReproduceOptions,
    Table,
    shipped_tables,
)

ROOT = HOME.parent
SEARCH = HOME / "best-recipe-search"
UPDATE = "Run python -m benchmarks.results_page."
# An absolute path as JSON writes it, anywhere in a text; not an address, a fraction or a name.
_PATH = re.compile(r'(?<![\w./])(~?/|[A-Za-z]:\\\\)\w[^\s"]*')

# Metrics of the papers, typed a second time.
PUBLISHED = (
    ("mpa-table4", "MPA", "recall@1", 69.2),
    ("mpa-table4", "Proxy-Anchor", "map@r", 26.7),
    ("mpa-table5", "MPA-AP", "ndcg@8", 78.8),
    ("proxynca-pp-cub", "+ fast proxies (ProxyNCA++)", "recall@1", 72.2),
    ("proxynca-pp-cars", "+ fast proxies (ProxyNCA++)", "recall@1", 90.1),
)
# The best row in a metric, according to the papers.
BEST = (
    ("mpa-table4", "map@r", "Proxy-Anchor"),
    ("mpa-table5", "map@r", "Proxy-Anchor"),
    ("mpa-table7", "recall@1", "K = 12"),
    ("mpa-table8", "recall@1", "K = 8"),
)


def check_study(study: Path) -> Iterator[str]:
    """Check that the page of a study matches its runs, and that searches use no test set."""
    try:
        all_results, text = read_study(study), study_page(study)
    except ReproduceError as error:
        yield str(error)
        return
    if (study / "README.md").read_text(encoding="utf-8") != text:
        yield f"{study / 'README.md'} does not match {RUNS}. {UPDATE}"
    for results in all_results:
        yield from check_runs(study, results)
        for record in results.all_runs if results.table.protocol == "held_out" else ():
            seen = any("test" in line for line in (record.last, *record.curve))
            if seen or record.kind != "held_out":
                yield f"{study / RUNS}: {record.table}: {record.id} uses the test set"


def check_runs(home: Path, results: Results) -> Iterator[str]:
    """Check that there are runs, made with the recipes of their rows."""
    table = results.table
    if not results.runs:
        yield f"{home / RUNS} has no runs of {table.name}"
    for record in read_runs(home):
        if record.table == table.name and record.row not in results.runs_of:
            yield f"{home / RUNS}: {record.id} has an unknown row: {record.row}"
    for record in results.all_runs:
        row = table.row(record.row)
        epochs = record.recipe["training"]["epochs"]
        options = ReproduceOptions(epochs=epochs if record.epochs_overridden else None)
        run = make_run(table, row, record.seed, record.kind, options, record.device != "CPU")
        name = f"{home / RUNS}: {record.id}"
        try:
            check_same(name, Recipe.load(record.recipe), run)
        except ReproduceError as error:
            yield str(error)
        # Runs with held-out classes do not record the number of training images.
        automatic = table.epochs(row) == AUTO and not record.epochs_overridden
        if automatic and record.kind == "full" and record.images is not None:
            batch_size = record.recipe["data"]["batch_size"]
            usual = choose_epochs(record.images["train"], batch_size, record.device != "CPU")
            if epochs != usual:
                yield f"{name} has {epochs} epochs without --epochs, not {usual}"


def check_paths(home: Path = HOME) -> Iterator[str]:
    """Check that no JSON file contains an absolute path."""
    for file in sorted([*home.rglob("*.json"), *home.rglob("*.jsonl")]):
        match = _PATH.search(file.read_text(encoding="utf-8"))
        if match:
            yield f"{file} contains an absolute path: {match[0]}"


def check_page() -> Iterator[str]:
    """Check that docs/results.md is up to date."""
    if PAGE.read_text(encoding="utf-8") != make_page():
        yield f"{PAGE} is not up to date. {UPDATE}"


def check_repeats(records: Iterable[Record]) -> Iterator[str]:
    """Check that runs of one recipe and seed differ by no more than the tolerances."""
    groups = repeats(records)
    if not any(len(group) == 4 for group in groups):
        yield "no recipe was run four times with one seed"
    for group in groups:
        differences = spread(group)
        if any(value > limit for value, limit in zip(differences, TOLERANCES, strict=True)):
            yield f"{group[0].row} of {group[0].table}: repeated runs differ by {differences}"


def check_twins(records: Iterable[Record]) -> Iterator[str]:
    """Check that runs with the same training on a GPU have equal losses."""
    groups = find_twins(records)
    if {record.seed for group in groups for record in group} != {0, 1, 2}:
        yield "runs with the same training are missing for the seeds 0, 1, 2"
    for group in groups:
        if not same_losses(group):
            yield f"{group[0].row} and {group[1].row}: same training, but different losses"


def check_published() -> Iterator[str]:
    """Check that tables have the metrics of the papers, and only their claims."""
    for name, row, metric, value in PUBLISHED:
        if Table.load(name).row(row).published.get(metric) != value:
            yield f"{name}, {row}: {metric} was published as {value}"
    for name, metric, best in BEST:
        rows = Table.load(name).rows
        if max(rows, key=lambda row: row.published[metric]).name != best:
            yield f"{name}: {best} has the best published {metric}"
    for table in map(Table.load, shipped_tables()):
        for claim in table.claims:
            better, worse = (
                table.row(n).published.get(claim.metric) for n in (claim.better, claim.worse)
            )
            if better is not None and worse is not None and better <= worse:
                yield f"{table.name} claims {claim.better} above {claim.worse}, published otherwise"


def check_settings() -> Iterator[str]:
    """Check that the tables of the MPA paper have its published settings."""
    for name, batch in (("mpa-table4", 180), ("mpa-table5", 64)):
        table = Table.load(name)
        for row in table.rows:
            r = make_run(table, row, 0, "full").recipe
            settings = (
                r.data.batch_size,
                r.model.pooling,
                r.schedule.every,
                r.schedule.factor,
                round(r.optimizer.lr * r.optimizer.proxy_multiplier, 9),
                r.loss.settings.get("proxies_per_class", 1),
            )
            proxies = 1 if row.name == "Proxy-Anchor" else 10
            if settings != (batch, "gem", 20, 0.5, 0.01, proxies):
                yield f"{name}, {row.name}: not the published setting: {settings}"


def check_best_recipes() -> Iterator[str]:
    """Check that the best recipes train as runs of their searches did."""
    # Birds were scaled up a little further than in their search.
    for name, untried in (("cub", ("data.short_side",)), ("cars", ())):
        best, table = f"best-{name}", Table.load(f"best-{name}")
        if table.recipe_values(table.row(best)) != plain_values(best):
            yield f"{table.name}: row {best} is not the recipe of that name"
        runs = [run for run in read_runs(SEARCH) if run.table == f"{name}-large"]
        tried = (Recipe.load(run.recipe) for run in runs)
        if not any(trains_alike(Recipe.load(best), one, untried) for one in tried):
            yield f"{best} does not train as any run of {name}-large"


def trains_alike(best: Recipe, tried: Recipe, untried: tuple[str, ...] = ()) -> bool:
    """Return whether only epochs and settings of the evaluation differ.

    ``untried`` are keys in which they may differ too.
    """
    apart = {*untried, *OF_TEST_IMAGES, "model.image_size", "model.resize"}
    longer = scale(tried, best.training.epochs).override(
        {
            "schedule.freeze_backbone_epochs": tried.schedule.freeze_backbone_epochs
        }  # best recipes keep it as it is
    )
    values, expected = (
        {
            key: value
            for key, value in recipe.computation_keys().items()
            if key not in apart and not key.startswith("evaluation.")
        }
        for recipe in (keep_choices(best, tried), longer)
    )
    return values == expected


def check_readme(records: Iterable[Record]) -> Iterator[str]:
    """Check that README and docs quote the best recipes, which beat all published metrics."""
    runs, names, single = list(records), ("cub", "cars"), "best-cub, one view per image"
    missing = {*(f"best-{name}" for name in names), single} - {r.row for r in runs}
    if missing:
        yield f"missing run of {' and '.join(sorted(missing))}"
        return

    def mean(row: str) -> float:
        row_runs = [record for record in runs if record.row == row]
        return 100 * fmean(record.metrics()["recall@1"] for record in row_runs)

    best = {name: mean(f"best-{name}") for name in names}
    for name, recall in best.items():
        published = max(
            row.published.get("recall@1", 0.0)
            for table in map(Table.load, shipped_tables())
            for row in table.rows
            if table.dataset(row) == name
        )
        if recall <= published:
            yield f"best-{name} has a recall@1 of {recall:.1f}, published is {published}"
    sentences = {
        "README.md": [
            rf"best-{name}/README\.md\) \| \*\*{recall:.1f}\*\*" for name, recall in best.items()
        ],
        "docs/training.md": [f"{best['cub']:.1f} with both and {mean(single):.1f} with neither"],
    }
    yield from _missing_text(sentences)


def check_faces() -> Iterator[str]:
    """Check that the pages on faces quote the metrics of the JSON files."""
    home = HOME / "faces-lfw"
    values = json.loads((home / "lfw.json").read_text(encoding="utf-8"))
    verified, identified = values["verify"], values["identify"]
    accuracy = f"{100 * verified['accuracy']:.2f} ± {100 * verified['standard_error']:.2f} %"
    folds = " | ".join(f"{100 * fold['accuracy']:.2f}" for fold in verified["folds"])
    rates = [f"{100 * identified['rank'][k]:.2f} %" for k in ("1", "5", "10", "100")]
    tar = [f"{100 * rate:.2f} %" for rate in identified["tar_at_far"].values()]
    needed = (accuracy, folds, f"{100 * verified['eer']:.2f} %", *rates, *tar)
    page = str((home / "README.md").relative_to(ROOT))
    needed_text = {page: needed, "docs/faces.md": (accuracy, rates[0])}
    yield from _missing_text({file: map(re.escape, these) for file, these in needed_text.items()})


def _missing_text(sentences: Mapping[str, Iterable[str]]) -> Iterator[str]:
    for file, needed in sentences.items():
        text = " ".join((ROOT / file).read_text(encoding="utf-8").split())
        for sentence in needed:
            if not re.search(sentence, text):
                yield f"{file} does not contain: {sentence}"


def find_errors() -> Iterator[str]:
    """Yield all errors."""
    for study in studies():
        yield from check_study(study)
    runs = [
        run for name in shipped_tables() for run in read_runs(HOME / name) if run.kind == "full"
    ]
    yield from check_paths()
    yield from check_page()
    yield from check_repeats(runs)
    yield from check_twins(runs)
    yield from check_published()
    yield from check_settings()
    yield from check_best_recipes()
    yield from check_readme(runs)
    yield from check_faces()


def main() -> int:
    errors = list(find_errors())
    for error in errors:
        print(error, file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
