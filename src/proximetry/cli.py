"""The command line: one plain function per command, built from its signature."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proximetry.training import Recipe

Progress = Callable[[int, int], None]


def demo(out: Path | None = None, seed: int = 0) -> None:
    """Train on the built-in glyphs and look for characters never seen in training.

    Takes about two minutes on two CPU cores and needs no download.

    Args:
        out: folder of the run; default: a new one below runs/.
        seed: of the run.
    """
    from proximetry.training.demo import run_demo
    from proximetry.training.display import make_display

    run_demo(out, seed, make_display())


def train(
    recipe: str,
    out: Path,
    device: str | None = None,
    fresh: bool = False,
    resolved: "Recipe | None" = None,
) -> None:
    """Train an embedder as a recipe says, or continue where a run was cut off.

    Every key of the recipe can be overridden: --optimizer.lr 2e-4 --data.root ~/cub

    Args:
        recipe: a YAML file, or the name of a shipped recipe (see: proximetry recipes).
        out: folder of the run; a run that is there is continued.
        device: cpu, cuda or cuda:1; default: cuda where there is one.
        fresh: refuse to continue a run that is there.
        resolved: the recipe with its overrides, where there are any.
    """
    from proximetry.training import Recipe
    from proximetry.training import train as run
    from proximetry.training.display import make_display, metrics_table

    chosen = Recipe.load(recipe) if resolved is None else resolved
    results = run(chosen, out, device=device, resume=not fresh, display=make_display())
    rows = {}
    for which in ("last", "chosen"):
        for part in ("held_out", "test"):
            if part in results[which]:
                label = f"{which} epoch ({results[which]['epoch']}), {part.replace('_', '-')}"
                rows[label] = results[which][part]
    print(metrics_table(rows))
    print(f"protocol: {results['protocol']}; embedder and results in {out}")


def evaluate(
    embedder: Path,
    dataset: str,
    root: Path | None = None,
    split: str = "test",
    recall_at: tuple[int, ...] = (1, 2, 4, 8),
    ndcg_at: tuple[int, ...] = (2, 4, 8),
    clustering: bool = False,
    batch_size: int = 64,
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Measure how well an embedder finds images of the same class again.

    Args:
        embedder: folder of a saved embedder, such as runs/first/embedder.
        dataset: glyphs, folder, csv, parquet, shards, faces, cub, cars, sop or inshop.
        root: where its images lie.
        split: which rows: test, train, val or all.
        recall_at: the k of recall@k.
        ndcg_at: the k of nDCG@k.
        clustering: also NMI, AMI and pairwise F1 of k-means.
        batch_size: images per forward pass.
        device: cpu or cuda; default: cuda where there is one.
        out: also write the numbers to this JSON file.
    """
    from proximetry import metrics
    from proximetry.models import Embedder
    from proximetry.training.display import metrics_table
    from proximetry.training.material import open_catalog, questions
    from proximetry.training.recipe import Data

    model = Embedder.load(embedder, device=_device(device))
    catalog = open_catalog(Data(dataset=dataset, root=None if root is None else str(root)))
    if split != "all":
        chosen = catalog.filter(split=split)
        if len(chosen) == 0:
            raise ValueError(f"{dataset} has no rows of split {split!r}; try --split all")
        catalog = chosen
    files = [catalog.file(i) for i in range(len(catalog))]
    with _progress("embedding") as report:
        vectors = model.encode(
            files, batch_size=batch_size, progress=lambda done: report(done, len(files))
        )
    with _progress("searching") as report:
        result = metrics.evaluate(
            **questions(catalog, vectors),
            recall_at=recall_at,
            ndcg_at=ndcg_at,
            clustering=clustering,
            metric="cosine" if model.architecture.normalize else "euclidean",
            progress=report,
        )
    print(metrics_table({f"{dataset} ({split})": result}))
    for note in catalog.notes:
        print(f"note: {note}")
    if out is not None:
        from proximetry._common import atomic_write

        atomic_write(out, json.dumps(result, indent=2).encode())


def embed(
    embedder: Path,
    images: list[str],
    out: Path = Path("vectors.npz"),
    batch_size: int = 64,
    flip: bool = False,
    device: str | None = None,
) -> None:
    """Turn images into vectors and write them to a .npz file (arrays: vectors, paths).

    Args:
        embedder: folder of a saved embedder.
        images: image files, and folders to be searched for them.
        out: file to write.
        batch_size: images per forward pass.
        flip: append the vector of the mirrored image.
        device: cpu or cuda; default: cuda where there is one.
    """
    import io

    import numpy as np

    from proximetry._common import atomic_write
    from proximetry.data.folders import is_image
    from proximetry.models import Embedder

    files: list[str] = []
    for path in map(Path, images):
        if path.is_dir():
            files += sorted(str(f) for f in path.rglob("*") if f.is_file() and is_image(f.name))
        elif path.is_file():
            files.append(str(path))
        else:
            raise ValueError(f"there is no image or folder {path}")
    if not files:
        raise ValueError(f"no images below {', '.join(images)}")
    model = Embedder.load(embedder, device=_device(device))
    with _progress("embedding") as report:
        vectors = model.encode(
            files, batch_size, flip=flip, progress=lambda done: report(done, len(files))
        )
    buffer = io.BytesIO()
    np.savez(buffer, vectors=vectors.numpy(), paths=np.array(files))
    atomic_write(out, buffer.getvalue())
    print(f"{len(files)} vectors of {vectors.shape[1]} numbers in {out}")


def export(embedder: Path, out: Path, opset: int = 18) -> None:
    """Write an embedder as ONNX and check that onnxruntime agrees with torch.

    Args:
        embedder: folder of a saved embedder.
        out: the .onnx file to write.
        opset: version of the ONNX operators.
    """
    from proximetry.models import Embedder

    model = Embedder.load(embedder)
    model.export_onnx(out, opset=opset)
    height, width = model.preprocessing.crop
    print(f"{out}: RGB 0…255, float32 [N, 3, {height}, {width}] → [N, {model.dim}], checked")


def recipes(show: str | None = None) -> None:
    """List the shipped recipes, or print one.

    Args:
        show: the recipe to print; a start for your own YAML file.
    """
    from proximetry.training.recipe import Recipe, find_recipe, shipped_recipes

    if show is not None:
        print(find_recipe(show).read_text(encoding="utf-8"), end="")
        return
    for known in shipped_recipes():
        print(f"{known:32} {Recipe.load(known).about}")


def datasets(describe: str | None = None, root: Path | None = None) -> None:
    """List the datasets that can be read, or check and describe one.

    Args:
        describe: the dataset to check and describe.
        root: where its images lie.
    """
    from proximetry.data import list_datasets
    from proximetry.training.material import open_catalog
    from proximetry.training.recipe import Data

    if describe is None:
        for known, about in list_datasets().items():
            print(f"{known:12} {about}")
        return
    catalog = open_catalog(Data(dataset=describe, root=None if root is None else str(root)))
    print(catalog.describe())


def reproduce(
    table: str | None = None,
    data: Path | None = None,
    out: Path = Path("results"),
    seeds: tuple[int, ...] = (0,),
    parallel: int = 1,
    backbone: str | None = None,
    weights: str | None = None,
    epochs: int | None = None,
    selection: bool | None = None,
    device: str | None = None,
    render: bool = False,
    keep: bool = False,
    list: bool = False,
) -> None:
    """Run every row of a published table and set the results beside the published figures.

    Rows that are done are skipped: a command that was cut off is simply given again.

    Args:
        table: name of a table, or a YAML file of your own; see --list.
        data: folder of the table's dataset, or one that holds it as cub/ or cars/.
        out: where the folder of the table is made: JSON per run, README.md, pictures.
        seeds: one run per row and seed.
        parallel: so many runs at once, in processes of their own; seconds are then not compared.
        backbone: another network than the table's, such as bn_inception or resnet50.tv_in1k.
        weights: its weights: auto, package, hub, none, or a file.
        epochs: another number of epochs; falls and evaluations move in proportion.
        selection: also choose the epoch on held-out classes; default: as the table says.
        device: cpu, cuda or cuda:1; default: cuda where there is one.
        render: only write README.md and the pictures anew from the results that are there.
        keep: keep checkpoints and embedders of the runs.
        list: list the tables and leave.
    """
    from proximetry import reproduce as room

    if list:
        return print(room.list_tables())
    if table is None:
        raise ValueError("which table? `proximetry reproduce --list` lists them")
    home = room.reproduce(
        table,
        data,
        out,
        seeds=seeds,
        parallel=parallel,
        backbone=backbone,
        weights=weights,
        epochs=epochs,
        selection=selection,
        device=device,
        render=render,
        keep=keep,
        watch=sys.stdout.isatty(),
        report=lambda line: print(line, flush=True),
    )
    print(f"results in {home / 'README.md'}")


COMMANDS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "train": train,
    "evaluate": evaluate,
    "embed": embed,
    "export": export,
    "recipes": recipes,
    "datasets": datasets,
    "reproduce": reproduce,
}


# Arguments that the signature alone cannot express.
_BY_HAND: dict[str, set[str | int]] = {
    "embed": {"images"},
    "train": {"resolved"},
    "reproduce": {"table", "seeds", "render", "keep", "list"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 it failed, 2 it was asked wrongly."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _main(words)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `proximetry recipes | head`
        sys.stderr.close()
        return 0


def _main(words: list[str]) -> int:
    try:
        from argparse import ArgumentError

        from jsonargparse import ArgumentParser
    except ImportError:
        print(
            "the command line needs an extra: pip install 'proximetry[train]'",
            file=sys.stderr,
        )
        return 1
    from proximetry import __version__
    from proximetry.training.recipe import Recipe
    from proximetry.training.recipe_values import RecipeError

    parser = ArgumentParser(
        prog="proximetry",
        description="Train embeddings with proxy-based losses, evaluate them, put them to use.",
        exit_on_error=False,
        version=__version__,
    )
    commands = parser.add_subcommands(required=True, dest="command")
    try:
        for name, function in COMMANDS.items():
            help_text = (function.__doc__ or "").split("\n\n")[0]
            sub = ArgumentParser(exit_on_error=False, description=help_text)
            sub.add_function_arguments(function, as_positional=True, skip=_BY_HAND.get(name))
            if name == "embed":
                sub.add_argument("images", nargs="+", help="image files, and folders of them")
            if name == "train":
                _add_recipe(sub, words)
            if name == "reproduce" and name in words[:1]:  # the room takes a second to import
                from proximetry.reproduce.arguments import add_arguments

                add_arguments(sub)
            commands.add_subcommand(name, sub, help=help_text)
        if not words:
            parser.print_help()
            return 2
        chosen = parser.parse_args(words)
        given = chosen[chosen.command].as_dict()
        given.pop("config", None)
        if chosen.command == "train":
            sections = {f.name: given.pop(f.name) for f in fields(Recipe)}
            given["resolved"] = Recipe.from_dict(sections)
    except (ArgumentError, RecipeError) as error:
        print(f"proximetry: {_readable(str(error), parser, words)}", file=sys.stderr)
        return 2
    except SystemExit as leaving:  # --help, --version, --print_config
        return int(leaving.code or 0)
    try:
        COMMANDS[chosen.command](**given)
    except Exception as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    """A sentence for a user's mistake; anything else is our mistake and keeps its traceback."""
    from proximetry.training.stopping import Stopped

    known = (ValueError, Stopped, ImportError, OSError)
    if isinstance(error, BrokenPipeError) or not isinstance(error, known):
        raise error
    print(f"proximetry: {error}", file=sys.stderr)
    return 1


def _add_recipe(parser: Any, words: Sequence[str]) -> None:
    """Make every key of the recipe an option, with the values of the chosen recipe as defaults."""
    from proximetry.training.recipe import Recipe

    named = next((w for w in words[1:] if not w.startswith("-")), None)
    parser.add_argument("--config", action="config", help="a YAML file with further overrides")
    parser.add_class_arguments(Recipe, None)
    if named is not None and words[0] == "train":
        parser.set_defaults(_flat(Recipe.load(named).to_dict()))


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and key != "settings":
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def _readable(message: str, parser: Any, words: Sequence[str]) -> str:
    """One sentence, with the nearest known option for a mistyped one."""
    text = " ".join(message.split())
    for word in words:
        if word.startswith("--"):
            option = word.split("=")[0]
            known: list[str] = []
            for sub in parser._subcommands_action._name_parser_map.values():
                known += sub._option_string_actions
            near = get_close_matches(option, known, 1)
            if option not in known and near and option in text:
                return f"{text}; did you mean {near[0]}?"
    return text


def _device(name: str | None) -> str:
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


@contextmanager
def _progress(what: str) -> Iterator[Progress]:
    """A bar on a terminal, after a moment; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def entry() -> None:
    """Run a command and leave with its exit code; the console script."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
