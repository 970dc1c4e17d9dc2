"""One plain function per command; heavy imports happen inside, so that help is quick."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError, first_few
from proximetry._util.files import atomic_write
from proximetry.cli import lists, report, search
from proximetry.cli.output import (
    AsJson,
    BadImages,
    BatchSize,
    TableColumns,
    advice_to_skip,
    check_document,
    check_out,
    progress_bar,
    say,
    tell,
)
from proximetry.cli.recipe_options import MetricsOptions, RecipeOptions
from proximetry.cli.serve import serve
from proximetry.models.names import LARGEST_DIM, Similarity
from proximetry.reproduce.options import ReproduceOptions


def demo(*, out: Path | None = None, seed: int = 0) -> None:
    """Train on the built-in glyphs and look for characters never seen in training.

    Takes two to three minutes on two CPU cores and needs no download. Also writes the report of the
    run, and a gallery of those characters to search.

    Args:
        out: folder of the run; default: a new one below runs/.
        seed: random seed of the run.
    """
    from proximetry.cli.demo import run_demo
    from proximetry.training.reporting import make_display

    run_demo(out, seed, make_display())


def train(
    images: str,
    out: Path | None = None,
    /,
    *,
    recipe: str | None = None,
    device: str | None = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    config: Path | None = None,
    print_config: Annotated[bool, Parameter(negative=())] = False,
    dry_run: Annotated[bool, Parameter(negative=())] = False,
    as_json: AsJson = False,
    overrides: RecipeOptions = {},  # noqa: B006
) -> None:
    """Train an embedder on your images or as a recipe says, or continue where it was cut off.

    Every key of the recipe can be overridden, as in: --optimizer.lr 2e-4 --training.epochs 30

    Args:
        images: a folder of class folders, a table (.csv, .parquet), a tar file, or a dataset's
            name; or vectors instead of images (.npz, .npy, .parquet, as `proximetry embed` writes
            them); or a recipe, shipped or a YAML file, that names them or gets --data.root.
        out: folder of the run; a run that is there is continued. Default: below runs/, named
            after the images or the recipe.
        recipe: for your images: a shipped recipe's name or a YAML file (see: proximetry recipes);
            if none is given, `default` on a GPU, `default-cpu` elsewhere, `vectors` for vectors.
        device: cpu, cuda or cuda:1; default: cuda where there is a GPU.
        fresh: remove a run that is there, also a complete one, and start over.
        config: a YAML file with overrides; those on the command line come after it.
        print_config: print the recipe with all overrides, and leave.
        dry_run: check everything, also that the images (20 000 at most) can be decoded; say what
            time, disk and memory it will take; write nothing.
        overrides: keys of the recipe.
    """
    from proximetry.cli.train_plan import make_plan, summary
    from proximetry.recipe.schema import merge, read_yaml

    more = read_yaml(config, "overrides") if config is not None else {}
    plan = make_plan(images, out, recipe, merge(more, overrides, whole=False), device, fresh)
    if print_config:
        print(plan.recipe.to_yaml(), end="")
        return
    from proximetry.training import train as run
    from proximetry.training.estimate import describe
    from proximetry.training.estimate import dry_run as check
    from proximetry.training.reporting import make_display

    leads = os.environ.get("RANK", "0") == "0"  # of several processes one prints
    if leads:
        for line in plan.lines:
            say(line, to_stderr=as_json)
    display = make_display(sys.stderr if as_json else None)
    if dry_run:
        found = check(plan.recipe, plan.out, device=device, resume=not fresh, display=display)
        text = describe(found)
    else:
        found = run(plan.recipe, plan.out, device=device, resume=not fresh, display=display)
        text = summary(found, plan)
        found = {"folder": str(plan.out), **found}
    if leads:
        tell(as_json, found, text)


def evaluate(
    embedder: Path,
    source: str | None = None,
    *,
    root: Path | None = None,
    similarity: Similarity | None = None,
    split: Literal["test", "train", "val", "all"] | None = None,
    options: MetricsOptions = {},  # noqa: B006
    eval_dims: Annotated[
        tuple[int, ...] | None, Parameter(validator=Number(gte=1, lte=LARGEST_DIM))
    ] = None,
    per_class: Annotated[bool, Parameter(negative=())] = False,
    confusions: Annotated[int, Parameter(validator=Number(gte=0))] = 0,
    binary: Annotated[bool, Parameter(negative=())] = False,
    expand: Annotated[int, Parameter(validator=Number(gte=0, lte=search.LARGEST_K))] = 0,
    rerank: Annotated[bool, Parameter(negative=())] = False,
    batch_size: BatchSize | None = None,
    bad_images: BadImages = "error",
    columns: TableColumns = None,
    device: str | None = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate an embedder, or vectors themselves, on retrieval metrics.

    Metrics and --eval-dims are those of the run that saved the embedder, unless they are given.

    Args:
        embedder: folder of a run or of a saved embedder, or hub:owner/name; or, alone, a file of
            vectors with labels from anywhere: .npz, .npy or .parquet, as `proximetry embed` writes.
        source: a folder of class folders, a CSV or Parquet table, a tar file, or a dataset that
            `proximetry datasets` lists; for an embedder of vectors, a file of these.
        root: where the images of such a dataset lie.
        similarity: how vectors without an embedder are compared, by default cosine; an embedder
            has its own.
        split: which images; default: test if there are such, else all.
        options: metrics; `proximetry metrics` lists the defaults.
        eval_dims: also evaluate the first d dimensions of the embedding, for each d.
        per_class: also show the classes with the worst metrics; with --json and --out, all.
        confusions: also show so many pairs of classes that are taken for each other most often.
        binary: also search by binary codes, alone and with the vectors deciding among the nearest;
            tells bytes per image and time per query.
        expand: also show query expansion: each query moved towards so many of its neighbours.
        rerank: also show k-reciprocal re-ranking of the nearest images.
        batch_size: images per forward pass; default: as in the evaluation of the run.
        device: cpu or cuda; default: cuda where there is a GPU.
        out: also write the JSON document to this file, which ends in .json.
    """
    from proximetry.cli.vectors import check_alone, load_embedder, open_images
    from proximetry.data import VectorCatalog, resolve_source

    given = str(embedder) if source is None else source
    check_document(out, [given])
    if source is None:
        check_alone(embedder)
    name, place = resolve_source(given, root)

    # These import torch, which takes seconds; what is wrong with the words is said before.
    from proximetry.cli import evaluation
    from proximetry.cli.search_methods import SearchMethods, make_rows
    from proximetry.training.evaluator import (
        encode_catalog,
        encode_readable,
        leakage_warnings,
        saved_evaluation,
        score_embedder,
        score_vectors,
    )
    from proximetry.training.query_gallery import check_comparison, choose_split

    model = None if source is None else load_embedder(embedder, device)
    if model is not None and similarity is not None:
        raise UsageError(f"--similarity is for vectors alone: the embedder in {embedder} knows")
    saved = saved_evaluation(model)
    metrics = replace(saved.metrics, **options)
    near = model.architecture.similarity if model is not None else similarity or "cosine"
    asked = SearchMethods(binary, expand, rerank)
    asked.check(near)
    skip, left_out = bad_images == "skip", list[str]()
    catalog, chosen = choose_split(open_images(name, place, columns, skip), split, given)
    dim = model.dim if model is not None else 0
    if model is None and isinstance(catalog, VectorCatalog):
        dim = catalog.vectors.shape[1]
    eval_dims = saved.eval_dims if eval_dims is None else eval_dims
    if eval_dims and max(eval_dims) >= dim:
        raise UsageError(
            f"--eval-dims must be below the embedding's {dim} dimensions, got {max(eval_dims)}"
        )
    notes = check_comparison(catalog, metrics)
    with progress_bar("evaluating") as report:
        if model is None and isinstance(catalog, VectorCatalog):
            scored, compared = score_vectors(catalog, near, metrics, eval_dims, report)
        elif model is not None:
            if skip:
                vectors, catalog, left_out = encode_readable(model, catalog, batch_size, report)
                notes = check_comparison(catalog, metrics)
            else:
                with advice_to_skip():
                    vectors = encode_catalog(model, catalog, batch_size, report)
            notes += leakage_warnings(model, catalog)
            scored, compared = score_embedder(
                model, catalog, metrics, eval_dims, batch_size, report, vectors=vectors
            )
        plain = next(iter(scored.values()))
        rows = make_rows(asked, plain, compared, metrics, report)
    document: dict[str, Any] = {
        "embedder": str(embedder) if source else None,
        "similarity": near,
        "dataset": name,
        "root": str(catalog.root),
        "split": chosen,
        "images": len(catalog),
        "classes": len(catalog.class_names),
        **evaluation.describe(scored, compared, per_class=per_class, confusions=confusions),
        **({"rows": rows} if rows else {}),
        "layout": catalog.layout,
        "notes": [*catalog.notes, *notes],
        "left_out": left_out,
    }
    if out is not None:
        atomic_write(out, json.dumps(document, indent=2).encode())
    tell(as_json, document, evaluation.as_text(document, Path(given).name or given))


def embed(
    embedder: Path,
    *images: str,
    out: Path = Path("vectors.npz"),
    batch_size: BatchSize = 64,
    flip: Annotated[bool, Parameter(negative=())] = False,
    bad_images: BadImages = "error",
    columns: TableColumns = None,
    device: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Embed images and write the embeddings to a file.

    Started by torchrun, several processes embed.

    Args:
        embedder: folder of a run or of a saved embedder, or hub:owner/name.
        images: image files, folders to be searched for them, CSV or Parquet tables, tar files;
            for an embedder of vectors, one file of these.
        out: file to write. .npz holds the arrays vectors, paths and, if the images come from
            class folders or a table, labels; .npy the vectors, with paths and labels in a file
            beside it, v.npy.json for v.npy; .parquet the columns path, label and vector.
        batch_size: images per forward pass.
        flip: append the embedding of the flipped image.
        device: cpu or cuda; default: cuda where there is a GPU.
    """
    from proximetry.cli.processes import processes
    from proximetry.cli.vectors import (
        Embedded,
        embed_files,
        embed_vectors,
        find_images,
        find_writer,
        left_out_file,
        write_left_out,
    )

    write, written = find_writer(out)
    skip = bad_images == "skip"
    for file in [*written, left_out_file(out)] if skip else written:
        check_out(file, images)
    files, notes = find_images(images, columns, allow_missing=skip)
    if not files:
        raise UsageError(f"no images below {', '.join(images) or 'nothing'}; name some")
    paths = [path for path, _ in files]
    with processes(device) as world, progress_bar("embedding", shown=world.leads) as report:
        found = embed_vectors(embedder, images, batch_size, flip, str(world.device))
        if found is None:
            found = embed_files(world, embedder, paths, batch_size, flip, skip, report)
        vectors, bad = found
    if not world.leads:
        return
    if not len(vectors):
        raise ValueError(f"none of the {len(files)} images can be read: {bad[0]}")
    kept = [image for i, image in enumerate(files) if i not in bad]
    write(Embedded(kept, vectors), out)
    left_out = [bad[i] for i in sorted(bad)]
    write_left_out(out, left_out)
    document = {
        "out": str(out),
        "images": len(kept),
        "dim": vectors.shape[1],
        "left_out": left_out,
        "notes": notes,
    }
    places = " and ".join(map(str, written))
    text = f"wrote {len(kept)} embeddings (dim {vectors.shape[1]}) to {places}"
    told = first_few([f"left out {reason}" for reason in left_out], str(left_out_file(out)))
    tell(as_json, document, "\n".join([*notes, *told, text]))


def export(embedder: Path, out: Path, *, opset: int = 18) -> None:
    """Write an embedder as ONNX and check that onnxruntime agrees with torch.

    Args:
        embedder: folder of a run or of a saved embedder, or hub:owner/name.
        out: the .onnx file to write.
        opset: version of the ONNX operators.
    """
    from proximetry.cli.vectors import load_embedder

    if out.suffix != ".onnx":
        raise UsageError(f"{out} must end in .onnx")
    check_out(out)
    model = load_embedder(embedder, "cpu")
    model.export_onnx(out, opset=opset)
    taken = str(model.preprocessing)
    if model.takes_images:
        height, width = model.preprocessing.crop
        taken = f"RGB 0…255, float32 [N, 3, {height}, {width}]"
    say(f"{out}: {taken} → [N, {model.dim}], checked")


def push(
    embedder: Path,
    repo: str,
    *,
    license: str | None = None,
    private: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Put an embedder, with a model card, into a repository of the Hugging Face Hub.

    Its class names, metrics and recipe go along. Commands that take an embedder then take
    hub:owner/name as well.

    Args:
        embedder: folder of a run or of a saved embedder.
        repo: the repository, owner/name; made if it is not there.
        license: the license that you give it, by the hub's name, such as apache-2.0.
        private: make a new repository private.
    """
    from proximetry.cli.vectors import load_embedder

    address = load_embedder(embedder, "cpu").push_to_hub(repo, license=license, private=private)
    say(f"{address}: to be named as hub:{repo}")


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
        data: folder of the dataset, or one that holds the datasets as cub/, cars/, flowers/.
        out: where the folder of the table is made: JSON per run, README.md, pictures.
        list_: list the tables and leave.
    """
    from proximetry.reproduce import ReproduceError, list_tables
    from proximetry.reproduce import reproduce as run
    from proximetry.reproduce.table import RunsFailedError

    if list_:
        say(list_tables())
        return
    if table is None:
        raise UsageError(
            "which table? Name it before the options; `proximetry reproduce --list` lists them"
        )
    try:
        home = run(table, data, out, options, report=say)
    except RunsFailedError:
        raise
    except ReproduceError as error:
        raise UsageError(str(error)) from error
    say(f"results in {home / 'README.md'}")


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (
        demo,
        train,
        evaluate,
        report.report,
        embed,
        export,
        push,
        search.index,
        search.search,
        search.duplicates,
        serve,
        reproduce,
        lists.recipes,
        lists.losses,
        lists.backbones,
        lists.datasets,
        lists.metrics,
    )
}
