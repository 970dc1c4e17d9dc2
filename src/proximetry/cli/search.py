"""The commands `index`, `search` and `duplicates`."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError, counted, first_few, shorten, some, spaced
from proximetry.cli.options import (
    GALLERY,
    LARGEST_K,
    AsJson,
    BadImages,
    BatchSize,
    Device,
    Flag,
    GalleryAddress,
    Neighbors,
    TableColumns,
)
from proximetry.cli.output import check_out, print_result, progress_bar, skip_hint

if TYPE_CHECKING:
    from proximetry.search import Gallery, SearchResult


def index(
    *images: str,
    model: Path | None = None,
    gallery: str = GALLERY,
    index: str | None = None,
    batch_size: BatchSize = 64,
    bad_images: BadImages = "error",
    columns: TableColumns = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Embed images and build a gallery of them, or add the new ones to a gallery.

    Interrupted? Run it again; it resumes. Under torchrun, all processes embed.

    Args:
        images: image files, folders to be searched for them, CSV or Parquet tables, tar files.
        model: folder of a run or of a saved embedder, or hub:owner/name; not needed to add to a
            folder, which stores its embedder.
        gallery: folder of the gallery, or an address on Milvus: milvus://host:19530/collection, or
            milvus:file.db for a local file.
        index: Flat searches exactly, HNSW32, IVF1024,PQ64 and other factory strings of faiss
            approximately, BFlat by binary codes; default: auto, which chooses by size.
    """
    from proximetry.cli.inputs import check_there, processes

    if "RANK" not in os.environ:  # under torchrun one process reports it, later
        for word in images:
            check_there(Path(word).expanduser())  # before torch is imported
    from proximetry.search.manifest import EMBEDDER, MANIFEST, is_milvus
    from proximetry.search.staging import distributed_workers, worker_loop

    with processes(device) as world:
        device = str(world.device) if world.size > 1 else device
        if not world.leads:
            worker_loop(lambda: _load(model or Path(gallery) / EMBEDDER, device))
            return
        with distributed_workers() if world.size > 1 else nullcontext():
            table, notes = _find_rows(images, columns, bad_images == "skip")
            exists = (Path(gallery) / MANIFEST).exists()
            if is_milvus(gallery):
                from proximetry.search import milvus

                exists = milvus.find(gallery) is not None
            with progress_bar("indexing") as progress, skip_hint():
                opened, added = _index(
                    gallery,
                    model,
                    index,
                    device,
                    table,
                    exists,
                    batch_size=batch_size,
                    bad_images=bad_images,
                    progress=progress,
                    report=notes.append,
                )
    missing, changed = set[str](), set[str]()
    for folder in map(os.path.expanduser, images):
        if exists and os.path.isdir(folder) and not is_milvus(gallery):
            gone, newer = opened.outdated(folder)
            missing.update(gone)
            changed.update(newer)
    skipped = list(map(str, opened.skipped))
    document = {
        "gallery": gallery,
        "images": len(opened),
        "added": added,
        "missing": len(missing),
        "changed": len(changed),
        "dim": opened.dim,
        "index": opened.index,
        "skipped": skipped,
        "notes": notes,
    }
    if missing or changed:
        outdated = some(map(_relative, [*sorted(missing), *sorted(changed)]))
        notes.append(
            f"{len(missing)} missing and {len(changed)} changed files since indexing: "
            f"{outdated}. To update the gallery, in Python: "
            "missing, changed = gallery.outdated(FOLDER); gallery.update(changed); "
            'gallery.remove(gallery.ids({"path": missing}))'
        )
    lines = first_few([f"skipped {one}" for one in skipped], "the document of --json")
    hint = "" if gallery == GALLERY else f" --gallery {shlex.quote(gallery)}"
    hint += f" --model {shlex.quote(str(model or 'RUN'))}" if is_milvus(gallery) else ""
    lines.append(f"{gallery}: {spaced(len(opened))} images, {spaced(added)} new")
    lines += ["", "Next:", f"  proximetry search QUERY.jpg{hint}"]
    print_result(as_json, document, "\n".join([*notes, *lines]))


def _index(
    gallery: str,
    model: Path | None,
    index: str | None,
    device: str | None,
    table: Any,
    exists: bool,
    **options: Any,
) -> tuple["Gallery", int]:
    """Build a gallery, or add the new images to it; return it and their number."""
    from proximetry.search import Gallery
    from proximetry.search.manifest import EMBEDDER
    from proximetry.search.rows import arrow, values

    if not exists:
        if model is None:
            raise UsageError(f"no embedder for the new gallery {gallery}. Pass --model RUN.")
        opened = Gallery.build(_load(model, device), table, gallery, index or "auto", **options)
        return opened, len(opened)
    if model is None and device is not None and (Path(gallery) / EMBEDDER).exists():
        model = Path(gallery) / EMBEDDER
    opened = Gallery.open(gallery, None if model is None else _load(model, device))
    if index not in (None, opened.index) and (index, opened.index) != ("auto", "BFlat"):
        raise UsageError(
            f"the gallery {gallery} was built with --index {opened.index}. Remove it, or choose "
            "another one with --gallery."
        )
    known = opened.known(values(table["path"]))
    if any(known):
        options["report"](f"{spaced(sum(known))} images are already in {gallery}")
    if all(known):
        return opened, 0
    new = table.take(arrow().array([row for row, one in enumerate(known) if not one]))
    added = len(opened.add(new, **options))
    if opened.needs_compaction:
        opened.compact(progress=options["progress"], report=options["report"])
    return opened, added


def _open(gallery: str, model: Path | None) -> "Gallery":
    from proximetry.search.manifest import is_milvus, read_manifest

    if not is_milvus(gallery):
        read_manifest(Path(gallery))  # reports a wrong name before torch is imported
    from proximetry.search import Gallery

    return Gallery.open(gallery, None if model is None else _load(model, None))


def _load(model: Path, device: str | None) -> Any:
    from proximetry.cli.inputs import load_embedder

    embedder = load_embedder(model, device)
    if not embedder.takes_images:
        raise UsageError(f"galleries store images, and {model} takes {embedder.preprocessing}")
    return embedder


def _find_rows(
    words: Sequence[str], columns: Mapping[str, str] | None, allow_missing: bool
) -> tuple[Any, list[str]]:
    """Return the images of files, folders, tables and shards, and notes on them."""
    from proximetry.cli.inputs import find_catalog, find_images
    from proximetry.data import VectorCatalog
    from proximetry.search import rows

    tables, notes = [], []
    for word in words:
        catalog = find_catalog(Path(word).expanduser(), columns, allow_missing=allow_missing)
        if isinstance(catalog, VectorCatalog) and not catalog.has_paths:
            raise UsageError(f"galleries store images; {word} has vectors without paths")
        if catalog is not None:
            tables.append(rows.make_rows(catalog))
            notes += catalog.remarks()
        elif (files := find_images([word]))[0]:
            paths, labels = zip(*files[0], strict=True)
            tables.append(rows.table({"path": [*map(rows.absolute, paths)], "label": labels}))
            notes += files[1]
    if not tables:
        raise UsageError(f"no images in {', '.join(words) or 'the arguments'}. Pass some.")
    table = rows.stack(tables)
    first = {path: row for row, path in reversed([*enumerate(table["path"].to_pylist())])}
    return table.take(rows.arrow().array(sorted(first.values()))), notes


def search(
    *queries: Path,
    k: Annotated[int, Parameter(name=["-k", "--k"], validator=Number(gte=1, lte=LARGEST_K))] = 10,
    gallery: GalleryAddress = GALLERY,
    model: Path | None = None,
    where: Annotated[
        tuple[str, ...], Parameter(metavar="COLUMN=VALUE", consume_multiple=False)
    ] = (),
    expand: Neighbors = 0,
    rerank: Flag = False,
    sheet: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Search a gallery for the images most similar to yours.

    Args:
        queries: image files.
        k: number of results per query.
        model: the run or embedder that built the gallery; needed on Milvus, which stores none.
        where: search only images with this value in a column: label=jay, split=test; of several
            values for one column any matches.
        expand: query expansion with this number of neighbors.
        rerank: order the nearest images by k-reciprocal re-ranking.
        sheet: also write a contact sheet: a self-contained .html page, or a .png.
    """
    from proximetry.cli.inputs import check_there
    from proximetry.data.folders import split_shard_path
    from proximetry.search.manifest import MANIFEST
    from proximetry.search.rows import parse_conditions

    if not queries:
        raise UsageError("no images to search for. Pass some.")
    for query in queries:
        if (query / MANIFEST).exists():
            raise UsageError(f"{query} is a gallery. Use proximetry search IMAGE --gallery {query}")
    check_out(sheet, [".html", ".png"], queries, "--sheet")
    for query in queries:  # before torch is imported
        check_there(Path(split_shard_path(str(query))[0]))
    opened, conditions = _open(gallery, model), parse_conditions(where)
    with progress_bar("embedding") as progress:
        result = opened.search(
            list(queries), k, where=conditions, expand=expand, rerank=rerank, progress=progress
        )
    names = [str(query) for query in queries]
    columns = {name: result.column(name) for name in result.columns}
    lists = [(name, _list_results(result, columns, row)) for row, name in enumerate(names)]
    tables = [_table(name, images, result.similarity) for name, images in lists]
    if sheet is not None:
        from proximetry.search import contact_sheet

        contact_sheet(sheet, names, result)
        tables.append(f"contact sheet: {sheet}")
    document = {
        "gallery": gallery,
        "images": len(opened),
        "similarity": result.similarity,
        "queries": [{"query": name, "found": images} for name, images in lists],
    }
    print_result(as_json, document, "\n\n".join(tables))


def _list_results(
    result: "SearchResult", columns: Mapping[str, Any], row: int
) -> list[dict[str, Any]]:
    """Return the results of one query, with the score that orders them, if it is another value."""
    images = list[dict[str, Any]]()
    for rank, image in enumerate(result.ids[row]):
        if image < 0:
            break
        near = round(float(result.similarities[row, rank]), 6)
        images.append({"id": int(image), "similarity": near})
        if result.scores is not None:
            images[-1]["score"] = round(float(result.scores[row, rank]), 6)
        images[-1] |= {name: column[row, rank] for name, column in columns.items()}
    return images


def _table(name: str, images: Sequence[Mapping[str, Any]], similarity: str) -> str:
    """Return the results of one query, one per line."""
    if not images:
        return f"{name}\n  no results"
    labels = [image["label"] or "" for image in images]
    width = min(24, max([len("class"), *map(len, labels)])) if any(labels) else 0
    heading, sign = ("cosine", 1) if similarity == "cosine" else ("distance", -1)
    header = f"  {'':>4}  {heading:>8}  "
    header += f"{'score':>8}  " if "score" in images[0] else ""
    header += f"{'class':{width}}  " if width else ""
    lines = [name, f"{header}image"]
    for rank, (image, label) in enumerate(zip(images, labels, strict=True), 1):
        line = f"  {rank:>4}  {sign * image['similarity']:8.4f}  "
        line += f"{image['score']:8.4f}  " if "score" in image else ""
        line += f"{shorten(label, width):{width}}  " if width else ""
        lines.append(line + _relative(image["path"]))
    return "\n".join(lines)


def _relative(path: str | None) -> str:
    """Return a path relative to the working folder, if it is below."""
    from proximetry.search.result import REMOVED

    return REMOVED if path is None else path.removeprefix(f"{os.getcwd()}{os.sep}")


def duplicates(
    gallery: GalleryAddress = GALLERY,
    *,
    threshold: float | None = None,
    sheet: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find near-duplicate images of a gallery.

    Args:
        threshold: the smallest cosine, or the largest Euclidean distance, of a pair; by default
            measured with altered copies of some of the images.
        sheet: also write the groups as a self-contained .html page.
    """
    check_out(sheet, [".html"], option="--sheet")
    opened = _open(gallery, None)
    with progress_bar("comparing") as progress:
        result = opened.duplicates(threshold, progress=progress)
    pairs = list(zip(result.pairs.tolist(), result.similarities.tolist(), strict=True))
    groups = [[result.paths[int(one)] for one in group] for group in result.groups]
    document: dict[str, Any] = {
        "gallery": gallery,
        "images": len(opened),
        "threshold": round(result.threshold, 6),
        "threshold_chosen": result.chosen or "given",
        "groups": groups,
        "pairs": [
            {"ids": pair, "paths": [result.paths[i] for i in pair], "similarity": round(near, 6)}
            for pair, near in pairs
        ],
    }
    # Pairs are sorted, so the last one of a group is the least similar.
    least = {pair[0]: near for pair, near in pairs}
    lines = [f"threshold: {result.chosen}"] if result.chosen else []
    for group, paths in zip(result.groups, groups, strict=True):
        near = min(least[int(one)] for one in group if int(one) in least)
        cosine = opened.similarity == "cosine"
        limit = f"cosine {near:.4f} or larger" if cosine else f"distance {-near:.4f} or smaller"
        lines += [f"{len(group)} images, {limit}", *(f"  {_relative(path)}" for path in paths)]
    members = f"{spaced(sum(map(len, groups)))} of {spaced(len(opened))} images"
    lines.append(f"{counted(len(groups), 'group')}, {members}")
    if sheet is not None:
        from proximetry.search.sheet import group_sheet

        shown = group_sheet(sheet, groups)
        part = "" if shown == len(groups) else f" of the first {spaced(shown)} groups"
        lines.append(f"contact sheet{part}: {sheet}")
    print_result(as_json, document, "\n".join(lines))
