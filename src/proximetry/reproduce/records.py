"""One JSON file per run: everything a figure needs to be believed, and no path of a machine."""

import json
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from proximetry._common import atomic_write
from proximetry.reproduce.plan import Job, Run, run_id
from proximetry.reproduce.trouble import ReproduceError
from proximetry.training.folder import RunFolder
from proximetry.training.recipe import Recipe
from proximetry.training.recipe_values import RecipeError, differences

_ENVIRONMENT = ("started", "python", "packages", "cuda", "git")
_WEIGHTS = ("auto", "package", "hub", "none")


@dataclass(frozen=True)
class Record:
    """What came of a run.

    Attributes:
        curve: epoch, seconds of training so far, loss, and the metrics where they were taken.
        last: epoch and metrics at the end.
        chosen_epoch: what a selection run chose.
        seconds: of training alone.
        parallel: how many runs shared the device; None in files that do not say.
        images: how many images of which split the dataset has; None in files that do not say.
    """

    table: str
    row: str
    slug: str
    seed: int
    kind: str
    recipe: dict[str, Any]
    command: str
    card: str
    environment: dict[str, Any]
    weights: dict[str, Any]
    protocol: str
    notes: list[str]
    last: dict[str, Any]
    chosen_epoch: int | None
    seconds: float | None
    startup_seconds: float | None
    curve: list[dict[str, Any]]
    parallel: int | None = None
    images: dict[str, int] | None = None

    @property
    def id(self) -> str:
        """The name of its file."""
        return run_id(self.slug, self.seed, self.kind)

    def test(self, epoch: int | None = None) -> dict[str, float] | None:
        """Metrics on the test set at an epoch, or at the end; None where they were not taken."""
        if epoch is None or epoch == self.last["epoch"]:
            found: dict[str, float] | None = self.last.get("test")
            return found
        return next((line.get("test") for line in self.curve if line["epoch"] == epoch), None)

    def write(self, folder: Path) -> None:
        """Write the file, whole or not at all."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"
        atomic_write(folder / f"{self.id}.json", text.encode())


# What is of next to no consequence for the results: words, pace and safety. Where pixels lie and
# how many images are embedded at once changes rounding alone: who cuts and who multiplies then
# adds up in another order.
_OF_NEXT_TO_NO_CONSEQUENCE = (
    "name",
    "about",
    "data.cache",
    "training.checkpoint_epochs",
    "training.checkpoint_steps",
    "training.keep_every",
    "training.wandb",
    "evaluation.batch_size",
)


def without_places(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, less where things lie on this machine."""
    values = recipe.to_dict()
    values["data"] |= {"root": None, "cache_dir": None}
    if values["model"]["weights"] not in _WEIGHTS:
        values["model"]["weights"] = Path(values["model"]["weights"]).name
    return values


def make_record(job: Job, folder: RunFolder, card: str, parallel: int) -> Record:
    """Gather what a finished run left in its folder."""
    run, recipe = job.run, job.recipe
    results = folder.read_results()
    environment = json.loads((folder.path / "environment.json").read_text(encoding="utf-8"))
    weights = dict(results["weights"])
    if weights["source"] == "file":
        weights["origin"] = Path(weights["origin"]).name
    root = recipe.data.root
    notes = [note.replace(f"{root}/", "") if root else note for note in results["notes"]]
    return Record(
        table=job.table,
        row=run.row,
        slug=run.slug,
        seed=run.seed,
        kind=run.kind,
        recipe=without_places(recipe),
        command=job.command,
        card=card,
        environment={key: environment.get(key) for key in _ENVIRONMENT},
        weights=weights,
        protocol=results["protocol"],
        notes=notes,
        last=results["last"],
        chosen_epoch=results["chosen"]["epoch"] if run.kind == "selection" else None,
        seconds=results.get("seconds"),
        startup_seconds=results.get("startup_seconds"),
        curve=[_point(line) for line in folder.history()],
        parallel=parallel,
        images=job.images,
    )


def _point(line: dict[str, Any]) -> dict[str, Any]:
    wanted = ("epoch", "seconds", "evaluation_seconds", "loss", "test", "held_out")
    return {key: line[key] for key in wanted if key in line}


def read_record(path: Path) -> Record:
    """Read a file back; one that is damaged or no run at all is named."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from error
    if not isinstance(values, dict) or not {"table", "row", "seed", "kind"} <= values.keys():
        raise ReproduceError(
            f"{path} is no run of a table, and this folder is for those alone; move it elsewhere, "
            "or use another --out"
        )
    try:
        needed = [f.name for f in fields(Record) if f.default is MISSING]
        missing = [name for name in needed if name not in values]
        unknown = sorted(set(values) - {f.name for f in fields(Record)})
        if missing or unknown:
            raise ValueError(f"keys missing: {missing}, unknown: {unknown}")
        record = Record(**values)
        if record.id != path.stem or "epoch" not in record.last:
            raise ValueError(f"it says that it is {record.id}")
    except (ValueError, TypeError, AttributeError) as error:
        raise _damaged(path, error) from error
    return record


def _damaged(path: Path, error: Exception) -> ReproduceError:
    return ReproduceError(
        f"{path} is no result of a run that can be read ({error}); remove it, and the same "
        "command runs it again"
    )


def read_records(folder: Path) -> dict[str, Record]:
    """All runs that are done, by their names."""
    return {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}


def check_same(path: Path, before: dict[str, Any], run: Run) -> None:
    """Refuse what was made with another recipe than the one asked for."""
    try:
        there = without_places(Recipe.from_dict(before))
    except RecipeError as error:
        raise ReproduceError(
            f"{path} was made with a recipe that this version cannot read ({error}); use another "
            "--out, or remove it"
        ) from error
    now = without_places(run.recipe)
    for key in _OF_NEXT_TO_NO_CONSEQUENCE:
        section, _, name = key.rpartition(".")
        for values in (there, now):
            (values[section] if section else values).pop(name)
    found = differences(there, now)
    if found:
        changed = "; ".join(f"{k} is {old!r} there and {new!r} now" for k, old, new in found[:3])
        raise ReproduceError(
            f"{path} was made with another recipe: {changed}. Use another --out, or "
            "remove it to run it anew"
        )
