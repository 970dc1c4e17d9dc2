"""What was run: the setting of a table's runs, and how it differs from the published one."""

from collections.abc import Iterable
from typing import Any

from proximetry.data import list_datasets
from proximetry.reproduce.grid import table_head, table_line
from proximetry.reproduce.plan import Options, command_for, falls, make_run
from proximetry.reproduce.records import Record
from proximetry.reproduce.results import Results
from proximetry.training.recipe import Recipe

_PACKAGES = ("proximetry", "torch", "timm", "numpy")
_NOTES_SHOWN = 3
NOT_RECORDED = "not recorded"


def setting(results: Results, selection: bool | None) -> str:
    """A table of what was run, and a sentence about what was published."""
    runs, environments = results.runs, [record.environment for record in results.everything]

    def of(key: str) -> str:
        return values(_get(record.recipe, key) for record in runs)

    dates = sorted(e["started"][:10] for e in environments)
    rows = {
        "data": data(results),
        "network": f"{of('model.backbone')}, {of('model.pooling')} pooling, "
        f"{values(map(_numbers, runs))} numbers; weights: {values(map(_weights, runs))}",
        "images": f"crop {of('model.image_size')} of {of('model.resize')}",
        "batch": f"{of('data.batch_size')}, {of('data.sampler')}",
        "optimiser": f"{of('optimizer.name')}, learning rate {of('optimizer.lr')}, proxies × "
        f"{of('optimizer.proxy_multiplier')}",
        "epochs": epochs(results),
        "precision": of("training.precision"),
        "protocol": "last epoch; the test set is looked at on the way for the curve alone",
        "seeds": ", ".join(map(str, results.seeds)),
        "card": values(record.card for record in results.everything),
        "runs at once": values(record.parallel or NOT_RECORDED for record in results.everything),
        "versions": _versions(results),
        "date": dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}",
        "command": f"`{command(results, selection)}`",
    }
    lines = [*table_head(["what was run", ""]), *map(table_line, rows.items())]
    published = results.table.published
    words = [f"Published with {published.backbone}; {published.protocol}."]
    return "\n".join(lines) + "\n\n" + " ".join([*words, published.note]).strip()


def data(results: Results) -> str:
    """Which images, how many of them, and what is to be known about them."""
    about = list_datasets()[results.table.dataset]
    title = about.partition(" (")[0].partition(":")[0]
    counts = values(_images(record) for record in results.everything)
    return "; ".join([f"{title}: {counts}", *_few_notes(results)])


def _images(record: Record) -> str:
    if record.images is None:
        return f"numbers of images {NOT_RECORDED}"
    train, test = (_grouped(record.images[split]) for split in ("train", "test"))
    return f"{train} training, {test} test images"


def _grouped(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def caption(results: Results) -> str:
    """What is to be known about the data, for below a table or a picture; empty if nothing is."""
    notes = _few_notes(results)
    return f"Data: {'; '.join(notes)}." if notes else ""


def _few_notes(results: Results) -> list[str]:
    notes = [note.rstrip(".") for note in results.notes]
    more = len(notes) - _NOTES_SHOWN
    last = [f"and {more} more notes in the JSON files"] if more > 0 else []
    return [*notes[:_NOTES_SHOWN], *last]


def _numbers(record: Record) -> str:
    dim, keep = record.recipe["model"]["dim"], record.recipe["model"].get("keep")
    return f"{keep} of {dim}" if keep else str(dim)


def _weights(record: Record) -> str:
    weights = record.weights
    digest = (weights.get("sha256") or "")[:10]
    return str(weights["origin"]) + (f" (sha256 {digest}…)" if digest else "")


def _versions(results: Results) -> str:
    environments = [record.environment for record in results.everything]
    versions = [f"Python {values(e['python'] for e in environments)}"]
    for name in _PACKAGES:
        known = [e["packages"].get(name) for e in environments]
        if any(known):
            versions.append(f"{name} {values(found or NOT_RECORDED for found in known)}")
        elif name == "proximetry":
            versions.append(f"proximetry: version {NOT_RECORDED}")
    if any(record.card != "CPU" for record in results.everything):
        versions.append(f"CUDA {values(e['cuda'] for e in environments)}")
    commits = sorted({_commit(e["git"]) for e in environments if e["git"]})
    return ", ".join(versions + ([f"code at {', '.join(commits)}"] if commits else []))


def _commit(git: dict[str, Any]) -> str:
    return str(git["commit"])[:10] + (" with changes" if git["changed"] else "")


def epochs(results: Results) -> str:
    """How many epochs were run, of how many."""
    table = results.table
    wanted = {table.epochs(table.row(record.row)) for record in results.runs}
    ran = values(sorted({record.recipe["training"]["epochs"] for record in results.runs}))
    if not _scaled(results):
        return f"{ran} epochs"
    if table.published.epochs is None:
        return f"{ran} of the table's {values(sorted(wanted))} epochs"
    return f"{ran} of the published {table.published.epochs} epochs"


def _scaled(results: Results) -> bool:
    table = results.table
    return any(
        record.recipe["training"]["epochs"] != table.epochs(table.row(record.row))
        for record in results.runs
    )


def command(results: Results, selection: bool | None) -> str:
    """The command that makes these runs again; ``selection`` as it was asked for, if it was."""
    first = results.runs[0].recipe
    model = first["model"]
    return command_for(
        results.table,
        results.seeds,
        model["backbone"],
        model["weights"],
        first["training"]["epochs"] if _scaled(results) else None,
        bool(results.selection) if selection is None else selection,
    )


def differences(results: Results) -> list[str]:
    """How the runs differ from what was published, a sentence each."""
    table, recipes = results.table, [Recipe.from_dict(r.recipe) for r in results.runs]
    found = [
        f"Network: {values(r.model.backbone for r in recipes)} here, {table.published.backbone} "
        "there."
    ]
    if _scaled(results):
        found.append(
            f"{epochs(results)}: falls of the learning rates and evaluations moved in proportion, "
            f"to whole epochs; the warm-up stayed.{_merged(results)}"
        )
    precisions = sorted({r.training.precision for r in recipes} - {"float32"})
    if precisions:
        found.append(f"The network runs in {', '.join(precisions)}; proxies and loss are float32.")
    sides = values(r.data.short_side or r.model.resize for r in recipes)
    resize, crop = (values(getattr(r.model, k) for r in recipes) for k in ("resize", "image_size"))
    found += [
        f"Training crops are cut from images scaled to a short side of {sides}.",
        f"Test images: short side to {resize}, centre crop {crop}.",
    ]
    if any(_grown(r) for r in recipes):
        found.append("Test images are scaled up to that from the short side before.")
    if any(r.model.mirror for r in recipes):
        rest = "" if all(r.model.mirror for r in recipes) else ", unless the row says otherwise"
        found.append(f"Test images are looked at twice, as they are and in the mirror{rest}.")
    if any(r.model.keep for r in recipes):
        found.append(
            "A wide embedding is trained, and turned to the principal axes of the training images; "
            "the first of its numbers are kept."
        )
    return [*found, *table.differences]


def _grown(recipe: Recipe) -> bool:
    kept, seen = recipe.data.short_side, recipe.model.resize
    return kept is not None and seen is not None and kept < seen


def _merged(results: Results) -> str:
    """Say so where falls came to lie on the same epoch, or past the end."""
    table = results.table
    lost = 0
    for record in results.runs:
        whole = make_run(table, table.row(record.row), record.seed, "full", Options()).recipe
        there = len(falls(Recipe.from_dict(record.recipe)))
        lost = max(lost, len(falls(whole)) - there)
    return f" {lost} of the falls coincide with others or with the end, and are lost." * (lost > 0)


def values(many: Iterable[Any]) -> str:
    """What all share, or all there is."""
    return ", ".join(dict.fromkeys(map(_shown, many)))


def _shown(value: Any) -> str:
    if value is None:
        return "the network's own"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _get(recipe: dict[str, Any], key: str) -> Any:
    inner: Any = recipe
    for part in key.split("."):
        inner = inner[part]
    return inner
