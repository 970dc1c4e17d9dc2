"""`proximetry index`: build a gallery of images, or add to it."""

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, join_first, truncate_lines
from proximetry.cli.inputs import load_image_embedder
from proximetry.cli.options import GALLERY, AsJson, BadImages, BatchSize, Device, TableColumns
from proximetry.cli.output import print_result, progress_bar, relative_path, skip_hint

if TYPE_CHECKING:
    from proximetry.search import Gallery


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

    Run an interrupted command again to resume it. Under torchrun, all processes embed.

    Args:
        images: image files, folders to search for them, CSV or Parquet tables, tar files.
        model: folder of a run or of a saved embedder, or hub:owner/name; not needed to add to a
            gallery in a folder, which stores its embedder.
        gallery: folder of the gallery, or an address on Milvus: milvus://host:19530/collection, or
            milvus:file.db for a local file.
        index: Flat searches exactly, HNSW32, IVF1024,PQ64 and other factory strings of faiss
            approximately, BFlat by binary codes; default: auto, which chooses by size.
    """
    from proximetry.cli.inputs import check_exists, processes

    if "RANK" not in os.environ:  # under torchrun one process reports it, later
        for word in images:
            check_exists(Path(word).expanduser())  # before torch is imported
    from proximetry.search.manifest import EMBEDDER, MANIFEST, is_milvus
    from proximetry.search.new_images import distributed_workers, worker_loop

    with processes(device, float64=False) as world:
        device = str(world.device) if world.size > 1 else device
        if not world.is_main:
            worker_loop(lambda: load_image_embedder(model or Path(gallery) / EMBEDDER, device))
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
            absent, newer = opened.check_files(folder)
            missing.update(absent)
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
        outdated = join_first(map(relative_path, [*sorted(missing), *sorted(changed)]))
        notes.append(
            f"{len(missing)} missing and {len(changed)} changed files since indexing: "
            f"{outdated}. To update the gallery, in Python: "
            "missing, changed = gallery.check_files(FOLDER); gallery.add(changed, replace=True); "
            'gallery.remove(gallery.ids({"path": missing}))'
        )
    lines = truncate_lines([f"skipped {one}" for one in skipped], "the document of --json")
    hint = "" if gallery == GALLERY else f" --gallery {shlex.quote(gallery)}"
    hint += f" --model {shlex.quote(str(model or 'RUN'))}" if is_milvus(gallery) else ""
    lines.append(f"{gallery}: {format_int(len(opened))} images, {format_int(added)} new")
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
    from proximetry.search.metadata import arrow, values

    if not exists:
        if model is None:
            raise UsageError(f"no embedder for the new gallery {gallery}. Pass --model RUN.")
        opened = Gallery.build(
            load_image_embedder(model, device), table, gallery, index or "auto", **options
        )
        return opened, len(opened)
    if model is None and device is not None and (Path(gallery) / EMBEDDER).exists():
        model = Path(gallery) / EMBEDDER
    opened = Gallery.open(gallery, None if model is None else load_image_embedder(model, device))
    if index not in (None, opened.index) and (index, opened.index) != ("auto", "BFlat"):
        raise UsageError(
            f"the gallery {gallery} was built with --index {opened.index}. Remove it, or choose "
            "another one with --gallery."
        )
    is_indexed = opened.contains(values(table["path"]))
    if any(is_indexed):
        options["report"](f"{format_int(sum(is_indexed))} images are already in {gallery}")
    if all(is_indexed):
        return opened, 0
    new = table.take(arrow().array([row for row, done in enumerate(is_indexed) if not done]))
    added = len(opened.add(new, **options))
    if opened.needs_compaction:
        opened.compact(progress=options["progress"], report=options["report"])
    return opened, added


def _find_rows(
    words: Sequence[str], columns: Mapping[str, str] | None, allow_missing: bool
) -> tuple[Any, list[str]]:
    """Return the images of files, folders, tables and shards, and notes on them."""
    from proximetry.cli.inputs import find_catalog, find_images
    from proximetry.data import VectorCatalog
    from proximetry.search import metadata

    tables, notes = [], []
    for word in words:
        catalog = find_catalog(Path(word).expanduser(), columns, allow_missing=allow_missing)
        if isinstance(catalog, VectorCatalog) and not catalog.has_paths:
            raise UsageError(f"{word} has vectors without paths. Pass images instead.")
        if catalog is not None:
            tables.append(metadata.from_images(catalog))
            notes += catalog.remarks()
        elif (files := find_images([word]))[0]:
            paths, labels = zip(*files[0], strict=True)
            tables.append(
                metadata.from_columns({"path": [*map(metadata.absolute, paths)], "label": labels})
            )
            notes += files[1]
    if not tables:
        raise UsageError(f"no images in {', '.join(words) or 'the arguments'}. Pass some.")
    table = metadata.concat(tables)
    first = {path: row for row, path in reversed([*enumerate(table["path"].to_pylist())])}
    return table.take(metadata.arrow().array(sorted(first.values()))), notes
