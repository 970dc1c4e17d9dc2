"""`proximetry index`: build a gallery of images, or add images to one."""

import os
import shlex
from contextlib import nullcontext
from pathlib import Path

from proximetry._util.formatting import format_int, join_first, truncate_lines
from proximetry.cli.options import AsJson, BadImages, BatchSize, Device, TableColumns
from proximetry.cli.output import print_result, progress_bar, relative_path, skip_hint
from proximetry.search.manifest import GALLERY


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
    """Embed images and build a gallery, or add the new images to an existing one.

    Run an interrupted command again to resume it. Under torchrun, all processes share the work.

    Args:
        images: image files, folders (searched recursively), CSV or Parquet tables, tar files.
        model: folder of a run or of a saved embedder, hub:owner/name, an ONNX file, or the name of
            a backbone; default: the gallery's embedder or, for a new gallery, a pretrained
            backbone from an installed package.
        gallery: folder of the gallery, or an address on Milvus: milvus://host:19530/collection, or
            milvus:file.db for a local file.
        index: Flat is exact; HNSW32, IVF1024,PQ64 and other faiss factory strings are approximate;
            BFlat searches binary codes; default: auto, which chooses by size.
    """
    from proximetry.cli.inputs import processes
    from proximetry.data.image_files import check_exists

    if "RANK" not in os.environ:  # under torchrun, rank 0 reports missing paths later
        for word in images:
            check_exists(Path(word).expanduser())  # before torch is imported
    from proximetry.search import metadata
    from proximetry.search.indexing import index_table, is_gallery, load_model
    from proximetry.search.manifest import ignore, is_milvus
    from proximetry.search.new_images import distributed_workers, worker_loop

    with processes(device, float64=False) as world:
        device = str(world.device) if world.size > 1 else device
        if not world.is_main:
            worker_loop(lambda: load_model(model, gallery, device, ignore))
            return
        with distributed_workers() if world.size > 1 else nullcontext():
            with progress_bar("listing images") as progress:
                table, notes = metadata.from_sources(
                    images, columns, allow_missing=bad_images == "skip", progress=progress
                )
            exists = is_gallery(gallery)
            with progress_bar("indexing") as progress, skip_hint():
                opened, added = index_table(
                    table,
                    gallery,
                    model,
                    index,
                    device,
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
    lines = truncate_lines([f"skipped {one}" for one in skipped], "the JSON document (--json)")
    hint = "" if gallery == GALLERY else f" --gallery {shlex.quote(gallery)}"
    if is_milvus(gallery):  # which stores no embedder
        hint += f" --model {shlex.quote(str(model or 'MODEL'))}"
    lines.append(f"{gallery}: {format_int(len(opened))} images, {format_int(added)} new")
    lines += ["", "Next:", f"  proximetry search QUERY.jpg{hint}"]
    if not is_milvus(gallery):
        lines.append(
            f"  proximetry serve{'' if gallery == GALLERY else f' {shlex.quote(gallery)}'}"
        )
    print_result(as_json, document, "\n".join([*notes, *lines]))
