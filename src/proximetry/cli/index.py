"""`proximetry index`: build a gallery of images, or add images to one."""

import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, join_first, truncate_lines
from proximetry.cli.options import AsJson, BadImages, BatchSize, Device, Flag, TableColumns
from proximetry.cli.output import echo, print_result, progress_bar, relative_path, skip_hint
from proximetry.search.manifest import GALLERY, is_milvus

if TYPE_CHECKING:
    from proximetry.search import Gallery


def index(
    *images: str,
    model: Path | None = None,
    gallery: str = GALLERY,
    index: str | None = None,
    sync: Flag = False,
    watch: Flag = False,
    interval: Annotated[float, Parameter(validator=Number(gt=0))] = 5.0,
    root: str | None = None,
    batch_size: BatchSize = 64,
    bad_images: BadImages = "error",
    columns: TableColumns = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Embed images and build a gallery, or add the new images to an existing one.

    Run an interrupted command again to resume it. Under torchrun, all processes share the work.

    Args:
        images: image files, folders (searched recursively), CSV or Parquet tables, tar files; or
            one .parquet, .npz or .npy file of vectors with any other columns, such as the file of
            `proximetry embed`; pass its --model to search the gallery with images.
        model: folder of a run or of a saved embedder, hub:owner/name, an ONNX file, or the name of
            a backbone; default: the gallery's embedder or, for a new gallery, a pretrained
            backbone from an installed package.
        gallery: folder of the gallery, or an address on Milvus: milvus://host:19530/collection, or
            milvus:file.db for a local file.
        index: Flat is exact; HNSW32, IVF1024,PQ64 and other faiss factory strings are approximate;
            BFlat searches binary codes; default: auto, which chooses by size.
        sync: also embed changed files again, follow moved ones, and remove images below the folders
            whose files are missing.
        watch: keep indexing new files, until Ctrl-C; files that are being written are left for
            later, unreadable ones are skipped.
        interval: seconds between two listings of --watch.
        root: first replace the start of the gallery's paths, after images were moved: OLD=NEW, or
            NEW for the common folder of all paths.
    """
    from proximetry.cli.inputs import processes
    from proximetry.data.image_files import check_exists

    if "RANK" not in os.environ:  # under torchrun, rank 0 reports missing paths later
        for word in images:
            check_exists(Path(word).expanduser())  # before torch is imported
    from proximetry.data.vectors import is_vector_file
    from proximetry.search import Gallery, metadata
    from proximetry.search.indexing import index_table, is_gallery, load_model
    from proximetry.search.manifest import ignore
    from proximetry.search.new_images import distributed_workers, worker_loop
    from proximetry.search.vector_files import index_vectors
    from proximetry.search.watch import watch as run_watch

    folders = [*filter(os.path.isdir, map(os.path.expanduser, images))]
    notes = list[str]()
    if root is not None and os.environ.get("RANK", "0") == "0":
        old, _, new = root.rpartition("=")
        count = Gallery.open(gallery).remap_paths(new, old or None)
        notes = [f"{gallery}: {format_int(count)} paths are now below {new}"]
        if not images:
            print_result(as_json, {"gallery": gallery, "root": new, "images": count}, notes[0])
            return
    if watch:
        if any(map(is_vector_file, images)):
            raise UsageError("--watch needs images, not vectors")
        for note in notes:
            echo(note)
        with suppress(KeyboardInterrupt):
            run_watch(
                lambda: metadata.from_sources(images, columns, allow_missing=True)[0],
                gallery,
                model,
                index,
                device,
                folders if sync else None,
                interval=interval,
                report=echo,
                batch_size=batch_size,
                progress=ignore,
            )
        echo("stopped")
        return
    with processes(device, float64=False) as world:
        device = str(world.device) if world.size > 1 else device
        if not world.is_main:
            worker_loop(lambda: load_model(model, gallery, device, ignore))
            return
        exists = is_gallery(gallery) and not sync
        options: dict[str, Any] = {"batch_size": batch_size, "report": notes.append}
        with distributed_workers() if world.size > 1 else nullcontext():
            if len(images) == 1 and is_vector_file(images[0]):
                with progress_bar("indexing") as options["progress"]:
                    opened, changes = index_vectors(
                        Path(images[0]), gallery, model, index, device, **options
                    )
            else:
                with progress_bar("listing images") as progress:
                    skip = bad_images == "skip"
                    table, remarks = metadata.from_sources(
                        images, columns, allow_missing=skip, progress=progress
                    )
                    notes += remarks
                options |= {"bad_images": bad_images}
                scope = folders if sync else None
                with progress_bar("indexing") as options["progress"], skip_hint():
                    opened, changes = index_table(
                        table, gallery, model, index, device, scope, **options
                    )
    missing, changed = _check_files(opened, folders if exists else [])
    skipped = list(map(str, opened.skipped))
    document = {
        "gallery": gallery,
        "images": len(opened),
        **changes._asdict(),
        "missing": len(missing),
        "changed": changes.changed if sync else len(changed),
        "dim": opened.dim,
        "index": opened.index,
        "skipped": skipped,
        "notes": notes,
    }
    if missing or changed:
        outdated = join_first(map(relative_path, missing + changed))
        notes.append(
            f"{len(missing)} missing and {len(changed)} changed files since indexing: "
            f"{outdated}. Update the gallery with --sync."
        )
    summary = str(changes) if sync else f"{format_int(changes.added)} new"
    lines = truncate_lines([f"skipped {one}" for one in skipped], "the JSON document (--json)")
    hint = "" if gallery == GALLERY else f" --gallery {shlex.quote(gallery)}"
    if is_milvus(gallery):  # which stores no embedder
        hint += f" --model {shlex.quote(str(model or 'MODEL'))}"
    lines.append(f"{gallery}: {format_int(len(opened))} images, {summary}")
    lines += ["", "Next:", f"  proximetry search QUERY.jpg{hint}"]
    lines.append(f"  proximetry serve{hint}")
    print_result(as_json, document, "\n".join([*notes, *lines]))


def _check_files(gallery: "Gallery", folders: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the missing and the changed files below folders; none for a gallery on Milvus."""
    missing, changed = set[str](), set[str]()
    for folder in [] if is_milvus(gallery.name) else folders:
        absent, newer = gallery.check_files(folder)
        missing.update(absent)
        changed.update(newer)
    return sorted(missing), sorted(changed)
