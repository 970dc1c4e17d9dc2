"""One plain function per command; heavy imports happen inside, so that help is quick."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from proximetry._common import Progress, atomic_write
from proximetry.cli.recipe_options import RecipeOptions
from proximetry.metrics.scores import Metrics
from proximetry.reproduce.options import ReproduceOptions

if TYPE_CHECKING:
    from proximetry.models import Embedder


def demo(*, out: Path | None = None, seed: int = 0) -> None:
    """Train on the built-in glyphs and look for characters never seen in training.

    Takes about a minute on two CPU cores and needs no download.

    Args:
        out: folder of the run; default: a new one below runs/.
        seed: random seed of the run.
    """
    from proximetry.training.demo import run_demo
    from proximetry.training.reporting import make_display

    run_demo(out, seed, make_display())


def train(
    recipe: str,
    out: Path,
    *,
    device: str | None = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    config: Path | None = None,
    print_config: Annotated[bool, Parameter(negative=())] = False,
    overrides: RecipeOptions = {},  # noqa: B006
) -> None:
    """Train an embedder as a recipe says, or continue where a run was cut off.

    Every key of the recipe can be overridden: --optimizer.lr 2e-4 --data.root ~/cub

    Args:
        recipe: a YAML file, or the name of a shipped recipe (see: proximetry recipes).
        out: folder of the run; a run that is there is continued.
        device: cpu, cuda or cuda:1; default: cuda where there is a GPU.
        fresh: remove a run that is there and start over.
        config: a YAML file with overrides; those on the command line come after it.
        print_config: print the recipe with all overrides, and leave.
        overrides: keys of the recipe.
    """
    from proximetry.training.recipe import Recipe, merge, read_yaml

    more = read_yaml(config, "overrides") if config is not None else {}
    chosen = Recipe.load(recipe, merge(more, overrides))
    if print_config:
        print(chosen.to_yaml(), end="")
        return
    from proximetry.training import train as run
    from proximetry.training.reporting import make_display, metrics_table, result_rows

    results = run(chosen, out, device=device, resume=not fresh, display=make_display())
    if os.environ.get("RANK", "0") != "0":  # of several processes one prints
        return
    rows = result_rows(results)
    if rows:
        print(metrics_table(rows))
    print(f"protocol: {results['protocol']}; embedder and results in {out}")


def evaluate(
    embedder: Path,
    dataset: str,
    *,
    root: Path | None = None,
    split: Literal["test", "train", "val", "all"] = "test",
    metrics: Annotated[Metrics, Parameter(name="*")] = Metrics(),  # noqa: B008
    eval_dims: tuple[int, ...] = (),
    batch_size: int | None = None,
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Measure how well an embedder finds images of the same class again.

    Args:
        embedder: folder of a run or of a saved embedder.
        dataset: a dataset that `proximetry datasets` lists.
        root: where its images lie.
        split: which images.
        eval_dims: also evaluate the first d dimensions of the embedding, for each d.
        batch_size: images per forward pass; default: as in the evaluation of the run.
        device: cpu or cuda; default: cuda where there is a GPU.
        out: also write the metrics to this JSON file.
    """
    from proximetry.data import open_dataset
    from proximetry.training import evaluate_embedder
    from proximetry.training.reporting import metrics_table

    model = _load(embedder, device)
    catalog = open_dataset(dataset, root)
    if split != "all":
        catalog = catalog.filter(split=split)
    if len(catalog) == 0:
        raise ValueError(f"{dataset} has no rows of split {split!r}; try --split all")
    with _progress("evaluating") as report:
        scores = evaluate_embedder(
            model,
            catalog,
            wanted=metrics,
            eval_dims=eval_dims,
            batch_size=batch_size,
            progress=report,
        )
    print(metrics_table({f"{dataset} ({split})": scores}))
    for note in catalog.notes:
        print(f"note: {note}")
    if out is not None:
        atomic_write(out, json.dumps(scores, indent=2).encode())


def embed(
    embedder: Path,
    *images: str,
    out: Path = Path("vectors.npz"),
    batch_size: int = 64,
    flip: Annotated[bool, Parameter(negative=())] = False,
    device: str | None = None,
) -> None:
    """Embed images and write the embeddings to a .npz file (arrays: vectors, paths).

    Args:
        embedder: folder of a run or of a saved embedder.
        images: image files, and folders to be searched for them.
        out: file to write.
        batch_size: images per forward pass.
        flip: append the embedding of the flipped image.
        device: cpu or cuda; default: cuda where there is a GPU.
    """
    import io

    import numpy as np

    from proximetry.data.folders import is_image

    files: list[str] = []
    for path in map(Path, images):
        if path.is_dir():
            files += sorted(str(f) for f in path.rglob("*") if f.is_file() and is_image(f.name))
        elif path.is_file():
            files.append(str(path))
        else:
            raise ValueError(f"there is no image or folder {path}")
    if not files:
        raise ValueError(f"no images below {', '.join(images) or 'nothing'}; name some")
    model = _load(embedder, device)
    with _progress("embedding") as report:
        vectors = model.encode(
            files, batch_size, concat_flip=flip, progress=lambda done: report(done, len(files))
        )
    buffer = io.BytesIO()
    np.savez(buffer, vectors=vectors.numpy(), paths=np.array(files))
    atomic_write(out, buffer.getvalue())
    print(f"wrote {len(files)} embeddings (dim {vectors.shape[1]}) to {out}")


def export(embedder: Path, out: Path, *, opset: int = 18) -> None:
    """Write an embedder as ONNX and check that onnxruntime agrees with torch.

    Args:
        embedder: folder of a run or of a saved embedder.
        out: the .onnx file to write.
        opset: version of the ONNX operators.
    """
    model = _load(embedder, "cpu")
    model.export_onnx(out, opset=opset)
    height, width = model.preprocessing.crop
    print(f"{out}: RGB 0…255, float32 [N, 3, {height}, {width}] → [N, {model.dim}], checked")


def recipes(*, show: str | None = None) -> None:
    """List the shipped recipes, or print one.

    Args:
        show: the recipe to print; a start for your own YAML file.
    """
    from proximetry.training.recipe import find_recipe, plain_values, shipped_recipes

    if show is not None:
        print(find_recipe(show).read_text(encoding="utf-8"), end="")
        return
    for name in shipped_recipes():
        values = plain_values(name)
        print(f"{name:28} {values['data']['dataset']:8} {values['about']}")


def datasets(*, describe: str | None = None, root: Path | None = None) -> None:
    """List the datasets that can be read, or check and describe one.

    Args:
        describe: the dataset to check and describe.
        root: where its images lie.
    """
    from proximetry.data import list_datasets, open_dataset

    if describe is not None:
        print(open_dataset(describe, root).describe())
        return
    for name, info in list_datasets().items():
        print(f"{name:12} {info.title} ({info.layout})")


def reproduce(
    table: str | None = None,
    *,
    data: Path | None = None,
    out: Path = Path("results"),
    options: Annotated[ReproduceOptions, Parameter(name="*")] = ReproduceOptions(),  # noqa: B008
    list_: Annotated[bool, Parameter(name="--list", negative=())] = False,
) -> None:
    """Run every row of a published table and set the results beside the published figures.

    Rows that are done are skipped: a command that was cut off is simply given again.

    Args:
        table: name of a table, or a YAML file of your own; see --list.
        data: folder of the table's dataset, or one that holds it as cub/ or cars/.
        out: where the folder of the table is made: JSON per run, README.md, pictures.
        list_: list the tables and leave.
    """
    from proximetry.reproduce import list_tables
    from proximetry.reproduce import reproduce as run

    if list_:
        print(list_tables())
        return
    if table is None:
        raise ValueError("which table? `proximetry reproduce --list` lists them")
    home = run(table, data, out, options, report=lambda line: print(line, flush=True))
    print(f"results in {home / 'README.md'}")


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (demo, train, evaluate, embed, export, recipes, datasets, reproduce)
}


def _load(folder: Path, device: str | None) -> "Embedder":
    """Read an embedder, given its folder or that of the run that saved it."""
    from proximetry._common import resolve_device
    from proximetry.models import Embedder
    from proximetry.training.run_folder import SECOND_STAGE

    places = (folder / "embedder", folder / SECOND_STAGE / "embedder")
    found = next((place for place in places if place.is_dir()), folder)
    return Embedder.load(found, device=resolve_device(device))


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
