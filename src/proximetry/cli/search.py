"""The commands that make a gallery of images and search it."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError, first_few, shorten, some, spaced
from proximetry._util.files import check_writable
from proximetry.cli.output import (
    AsJson,
    BadImages,
    BatchSize,
    TableColumns,
    advice_to_skip,
    progress_steps,
    tell,
)

if TYPE_CHECKING:
    from proximetry.search import Gallery, SearchResult

GALLERY = "gallery"
"""Where `index` makes a gallery and the others look for it, unless told otherwise."""
LARGEST_K = 10_000


def index(
    *images: str,
    model: Path | None = None,
    gallery: str = GALLERY,
    index: str | None = None,
    batch_size: BatchSize = 64,
    bad_images: BadImages = "error",
    columns: TableColumns = None,
    device: str | None = None,
    as_json: AsJson = False,
) -> None:
    """Embed images and make a gallery of them, or add those that are new to one.

    A command that was cut off is simply given again: what is embedded is not embedded twice.
    Started by torchrun, several processes embed.

    Args:
        images: image files, folders to be searched for them, CSV or Parquet tables, tar files.
        model: folder of a run or of a saved embedder, or hub:owner/name; not needed to add to a
            folder, which keeps its own.
        gallery: folder of the gallery, or an address on Milvus: milvus://host:19530/collection, or
            milvus:file.db for a local file.
        index: Flat searches exactly, HNSW32, IVF1024,PQ64 and other factory strings of faiss
            approximately, BFlat by binary codes; default: auto, which chooses by size.
        batch_size: images per forward pass.
        device: cpu or cuda; default: cuda where there is a GPU.
    """
    from proximetry.cli.inputs import check_there, processes

    if "RANK" not in os.environ:  # of several processes one tells it, later
        for word in images:
            check_there(Path(word).expanduser())  # a wrong name is told before torch is imported
    from proximetry.search.manifest import EMBEDDER
    from proximetry.search.staging import help_out, with_helpers

    with processes(device) as world:
        own = str(world.device) if world.size > 1 else device
        if world.leads:
            with with_helpers() if world.size > 1 else nullcontext():
                table, notes = _find_rows(images, columns, bad_images == "skip")
                folders = [word for word in images if os.path.isdir(os.path.expanduser(word))]
                _index(
                    table,
                    notes,
                    folders,
                    model,
                    gallery,
                    index,
                    batch_size,
                    bad_images,
                    own,
                    as_json,
                )
        else:
            help_out(lambda: _load(model or Path(gallery) / EMBEDDER, own))


def _index(
    table: Any,
    notes: list[str],
    folders: Sequence[str],
    model: Path | None,
    gallery: str,
    index: str | None,
    batch_size: int,
    bad_images: str,
    device: str | None,
    as_json: bool,
) -> None:
    from proximetry.search import Gallery
    from proximetry.search.gallery import LEFT_OUT
    from proximetry.search.manifest import is_milvus

    there = _exists(gallery)
    if not there and model is None:
        raise UsageError(f"which embedder? There is no gallery {gallery} yet: give --model RUN")
    told: list[str] = []
    with progress_steps() as steps:
        options: dict[str, Any] = {
            "batch_size": batch_size,
            "bad_images": bad_images,
            "steps": steps,
            "report": told.append,
        }
        with advice_to_skip():
            if there:
                added = _add(gallery, model, index, device, table, told, options)
                opened = Gallery.open(gallery)
            else:
                embedder = _load(model, device)
                opened = Gallery.build(embedder, table, gallery, index or "auto", **options)
                added = len(opened)
    missing, changed = _outdated(opened, folders if there else [], told)
    left_out = [line for line in told if line.startswith(LEFT_OUT)]
    told = [line for line in told if not line.startswith(LEFT_OUT)]
    document = {
        "gallery": gallery,
        "images": len(opened),
        "added": added,
        "missing": missing,
        "changed": changed,
        "dim": opened.dim,
        "index": opened.index,
        "left_out": [line.removeprefix(LEFT_OUT) for line in left_out],
        "notes": [*notes, *told],
    }
    text = f"{gallery}: {spaced(len(opened))} images, {spaced(added)} of them new"
    hint = "Next:\n  proximetry search QUERY.jpg"
    hint += "" if gallery == GALLERY else f" --gallery {shlex.quote(gallery)}"
    hint += f" --model {shlex.quote(str(model or 'RUN'))}" if is_milvus(gallery) else ""
    told += first_few(left_out, "the document of --json")
    tell(as_json, document, "\n".join([*notes, *told, text, "", hint]))


def _outdated(opened: "Gallery", folders: Sequence[str], told: list[str]) -> tuple[int, int]:
    """Count the files below folders that are missing or have changed, and warn of them."""
    from proximetry.search.manifest import is_milvus

    missing: dict[str, None] = {}
    changed: dict[str, None] = {}
    for folder in () if is_milvus(opened.name) else folders:
        gone, new = opened.outdated(os.path.expanduser(folder))
        missing |= dict.fromkeys(gone)
        changed |= dict.fromkeys(new)
    if missing or changed:
        calls = ["missing, changed = gallery.outdated(FOLDER)"]
        calls += ["gallery.update(changed)"] if changed else []
        calls += ['gallery.remove(gallery.ids({"path": missing}))'] if missing else []
        told.append(
            f"{spaced(len(missing))} file{' is' if len(missing) == 1 else 's are'} missing, "
            f"{spaced(len(changed))} {'has' if len(changed) == 1 else 'have'} changed since "
            f"indexing: {some(map(_short, [*missing, *changed]))}. "
            f"To update the gallery, in Python: {'; '.join(calls)}"
        )
    return len(missing), len(changed)


def _exists(gallery: str) -> bool:
    from proximetry.search.manifest import MANIFEST, is_milvus

    if is_milvus(gallery):
        from proximetry.search.milvus import exists

        return exists(gallery)
    return (Path(gallery) / MANIFEST).exists()


def _open(gallery: str, model: Path | None) -> "Gallery":
    from proximetry.search.manifest import is_milvus, read_manifest

    if not is_milvus(gallery):
        read_manifest(Path(gallery))  # a wrong name is told before torch is imported
    from proximetry.search import Gallery

    return Gallery.open(gallery, None if model is None else _load(model, None))


def _load(model: Path | None, device: str | None) -> Any:
    from proximetry.cli.inputs import load_embedder

    assert model is not None
    embedder = load_embedder(model, device)
    if not embedder.takes_images:
        raise UsageError(f"galleries hold images, and {model} takes {embedder.preprocessing}")
    return embedder


def _find_rows(
    words: Sequence[str], columns: Mapping[str, str] | None, allow_missing: bool
) -> tuple[Any, list[str]]:
    """The images that are meant by files, folders, tables and shards, and notes on them."""
    from proximetry.cli.inputs import find_catalog, find_images
    from proximetry.data import VectorCatalog
    from proximetry.search import rows

    tables, notes = [], []
    for word in words:
        catalog = find_catalog(Path(word).expanduser(), columns, allow_missing=allow_missing)
        if isinstance(catalog, VectorCatalog) and not catalog.has_paths:
            raise UsageError(f"galleries hold images, and {word} holds vectors without their paths")
        if catalog is not None:
            tables.append(rows.make_rows(catalog))
            notes += catalog.remarks()
        elif (found := find_images([word]))[0]:
            paths, labels = zip(*found[0], strict=True)
            files = [rows.absolute(path) for path in paths]
            tables.append(rows.table({"path": files, "label": labels}))
            notes += found[1]
    if not tables:
        raise UsageError(f"no images below {', '.join(words) or 'nothing'}; name some")
    table = rows.stack(tables)
    first = {path: row for row, path in reversed([*enumerate(table["path"].to_pylist())])}
    return table.take(rows.arrow().array(sorted(first.values()))), notes


def _add(
    gallery: str,
    model: Path | None,
    index: str | None,
    device: str | None,
    table: Any,
    told: list[str],
    options: dict[str, Any],
) -> int:
    """Add what is new to a gallery that is there, and say what is not."""
    from proximetry.search import Gallery
    from proximetry.search.manifest import EMBEDDER
    from proximetry.search.rows import arrow, values

    if model is None and device is not None and (Path(gallery) / EMBEDDER).exists():
        model = Path(gallery) / EMBEDDER
    found = Gallery.open(gallery, None if model is None else _load(model, device))
    same = index in (None, found.index) or (index == "auto" and found.index == "BFlat")
    if not same:
        raise UsageError(
            f"the gallery {gallery} was made with --index {found.index}; for another one remove it "
            "or choose another with --gallery"
        )
    known = found.known(values(table["path"]))
    if any(known):
        told.append(f"{spaced(sum(known))} images are in {gallery} already")
    if all(known):
        return 0
    new = table.take(arrow().array([row for row, one in enumerate(known) if not one]))
    added = len(found.add(new, **options))
    if found.needs_compaction:
        found.compact(steps=options["steps"], report=told.append)
    return added


def search(
    *queries: Path,
    k: Annotated[int, Parameter(name=["-k", "--k"], validator=Number(gte=1, lte=LARGEST_K))] = 10,
    gallery: str = GALLERY,
    model: Path | None = None,
    where: Annotated[
        tuple[str, ...], Parameter(metavar="COLUMN=VALUE", consume_multiple=False)
    ] = (),
    expand: Annotated[int, Parameter(validator=Number(gte=0, lte=LARGEST_K))] = 0,
    rerank: Annotated[bool, Parameter(negative=())] = False,
    sheet: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find the images of a gallery that are most like yours.

    Args:
        queries: image files.
        k: how many to find for each.
        gallery: folder of the gallery, or its address on Milvus.
        model: the run or embedder that made the gallery; needed on Milvus, which keeps none.
        where: search only images with this value in a column: label=jay, split=test; of several
            values for one column any will do.
        expand: query expansion: search again for the query moved towards so many of its neighbours.
        rerank: order what is nearest by k-reciprocal re-ranking.
        sheet: also write a contact sheet: a .html page that needs no other file, or a .png.
    """
    from proximetry.cli.inputs import check_there
    from proximetry.data.shards import split_shard_path
    from proximetry.search.manifest import MANIFEST
    from proximetry.search.rows import conditions

    if not queries:
        raise UsageError("which images? Name some to search for")
    for query in queries:
        if (query / MANIFEST).exists():
            raise UsageError(f"{query} is a gallery: proximetry search IMAGE --gallery {query}")
    if sheet is not None:
        if sheet.suffix not in (".html", ".png"):
            raise UsageError(f"--sheet {sheet} must end in .html or .png")
        check_writable(sheet)
    for query in queries:  # before torch is imported
        check_there(Path(split_shard_path(str(query))[0]))
    opened = _open(gallery, model)
    with progress_steps() as steps:
        result = opened.search(
            list(queries),
            k,
            where=conditions(where),
            expand=expand,
            rerank=rerank,
            steps=steps,
        )
    names = [str(query) for query in queries]
    if sheet is not None:
        from proximetry.search import contact_sheet

        contact_sheet(sheet, names, result)
    text = "\n\n".join(_table(name, result, row) for row, name in enumerate(names))
    if sheet is not None:
        text += f"\n\ncontact sheet: {sheet}"
    tell(as_json, _document(gallery, opened, names, result), text)


def _document(
    gallery: str, opened: "Gallery", names: Sequence[str], result: "SearchResult"
) -> dict[str, Any]:
    columns = {name: result.column(name) for name in result.columns}
    return {
        "gallery": gallery,
        "images": len(opened),
        "similarity": result.similarity,
        "queries": [
            {
                "query": name,
                "found": [
                    {
                        "id": int(result.ids[row, rank]),
                        "similarity": round(float(result.similarities[row, rank]), 6),
                        **_score(result, row, rank),
                        **{column: found[row, rank] for column, found in columns.items()},
                    }
                    for rank in range(result.k)
                    if result.ids[row, rank] >= 0
                ],
            }
            for row, name in enumerate(names)
        ],
    }


def _score(result: "SearchResult", row: int, rank: int) -> dict[str, float]:
    """What the order is by, where it is not the similarity."""
    return {} if result.scores is None else {"score": round(float(result.scores[row, rank]), 6)}


def _table(name: str, result: "SearchResult", row: int) -> str:
    """The images found for one query, one to a line."""
    cosine = result.similarity == "cosine"
    score = "cosine" if cosine else "distance"
    labels = [label or "" for label in result.labels[row]]
    width = min(24, max([len("class"), *map(len, labels)])) if any(labels) else 0
    other = "" if result.scores is None else f"{'ordered by':>10}  "
    lines = [
        name,
        f"  {'':>4}  {score:>8}  {other}" + (f"{'class':{width}}  " if width else "") + "image",
    ]
    for rank in range(result.k):
        if result.ids[row, rank] < 0:
            break
        near = float(result.similarities[row, rank]) * (1 if cosine else -1)
        label = f"{shorten(labels[rank], width):{width}}  " if width else ""
        other = "".join(f"{value:10.4f}  " for value in _score(result, row, rank).values())
        lines.append(
            f"  {rank + 1:>4}  {near:8.4f}  {other}{label}{_short(result.paths[row, rank])}"
        )
    return "\n".join(lines if len(lines) > 2 else [*lines[:1], "  nothing found"])


def _short(path: str | None) -> str:
    """A path from here, if it lies below."""
    from proximetry.search.result import REMOVED

    if path is None:
        return REMOVED
    here = f"{os.getcwd()}{os.sep}"
    return path.removeprefix(here)


def duplicates(
    gallery: str = GALLERY,
    *,
    threshold: float | None = None,
    sheet: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find images of a gallery that are copies of each other, or nearly.

    Args:
        gallery: folder of the gallery, or its address on Milvus.
        threshold: the smallest cosine, or the largest Euclidean distance, of a pair; by default
            measured with altered copies of some of the images.
        sheet: also write the groups as a .html page that needs no other file.
    """
    if sheet is not None:
        if sheet.suffix != ".html":
            raise UsageError(f"--sheet {sheet} must end in .html")
        check_writable(sheet)
    opened = _open(gallery, None)
    with progress_steps() as steps:
        found = opened.duplicates(threshold, steps=steps)
    document: dict[str, Any] = {
        "gallery": gallery,
        "images": len(opened),
        "threshold": round(found.threshold, 6),
        "threshold_chosen": found.chosen or "given",
        "groups": [[found.paths[int(one)] for one in group] for group in found.groups],
        "pairs": [
            {
                "ids": pair.tolist(),
                "paths": [found.paths[int(one)] for one in pair],
                "similarity": round(float(near), 6),
            }
            for pair, near in zip(found.pairs, found.similarities, strict=True)
        ],
    }
    group_of = {int(one): number for number, group in enumerate(found.groups) for one in group}
    # Pairs come most alike first, so the last one of a group is the least alike.
    least = {
        group_of[int(pair[0])]: near
        for pair, near in zip(found.pairs, found.similarities, strict=True)
    }
    lines = [f"threshold: {found.chosen}"] if found.chosen else []
    for number, group in enumerate(found.groups):
        lines.append(f"{len(group)} images, {_named(opened.similarity, least[number])}")
        lines += [f"  {_short(found.paths[int(one)])}" for one in group]
    count = len(found.groups)
    lines.append(
        f"{spaced(count)} group{'s' if count != 1 else ''} with {spaced(len(group_of))} of "
        f"{spaced(len(opened))} images"
        if count
        else f"no two of {spaced(len(opened))} images are alike"
    )
    if sheet is not None:
        from proximetry.search.sheet import group_sheet

        shown = group_sheet(sheet, document["groups"])
        part = "" if shown == count else f" of the first {spaced(shown)} groups"
        lines.append(f"contact sheet{part}: {sheet}")
    tell(as_json, document, "\n".join(lines))


def _named(similarity: str, near: float) -> str:
    """The least similarity of a group in words."""
    if similarity == "cosine":
        return f"cosine {near:.4f} or larger"
    return f"distance {-near:.4f} or smaller"
