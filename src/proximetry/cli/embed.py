"""`proximetry embed`: embed images and write the embeddings to a file."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write
from proximetry._util.formatting import truncate_lines
from proximetry._util.imports import import_optional
from proximetry._util.types import Progress
from proximetry.cli.inputs import load_embedder, processes
from proximetry.cli.options import (
    AsJson,
    BadImages,
    BatchSize,
    Device,
    EmbedderFolder,
    Flag,
    TableColumns,
)
from proximetry.cli.output import check_out, print_result, progress_bar, skip_hint

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from proximetry.data.image_files import ImageFile
    from proximetry.training.distributed import World


def embed(
    embedder: EmbedderFolder,
    *images: str,
    out: Path = Path("vectors.npz"),
    batch_size: BatchSize = 64,
    flip: Flag = False,
    bad_images: BadImages = "error",
    columns: TableColumns = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Embed images and write the embeddings to a file.

    Under torchrun, all processes share the work.

    Args:
        images: image files, folders (searched recursively), CSV or Parquet tables, tar files;
            for an embedder of vectors, one file of vectors.
        out: output file. .npz has the arrays vectors, paths and, for class folders and tables,
            labels; .npy has the vectors, with paths and labels in OUT.json; .parquet has the
            columns path, label and vector.
        flip: append the embedding of the horizontally flipped image.
    """
    from proximetry.data.image_files import find_images
    from proximetry.data.vectors import SUFFIXES, rows_file

    check_out(out, SUFFIXES, images)
    if out.suffix.lower() == ".parquet":
        import_optional("pyarrow", "images", "Writing Parquet")
    outputs = [out, rows_file(out)] if out.suffix.lower() == ".npy" else [out]
    skip, skipped_file = bad_images == "skip", out.with_name(f"{out.name}.skipped.json")
    for file in [*outputs[1:], *([skipped_file] if skip else [])]:
        check_out(file, [".json"], images)
    with progress_bar("listing images") as report:
        files, notes = find_images(images, columns, allow_missing=skip, progress=report)
    if not files:
        places = ", ".join(images) or "the arguments"
        raise UsageError(f"no images in {places}. Pass image files or folders.")
    paths = [path for path, _ in files]
    bad: dict[int, str] = {}
    with (
        processes(device, float64=False) as world,
        progress_bar("embedding", enabled=world.is_main) as report,
    ):
        vectors = _embed_vectors(embedder, images, batch_size, flip, str(world.device))
        if vectors is None:
            vectors, bad = _embed_files(world, embedder, paths, batch_size, flip, skip, report)
    if not world.is_main:
        return
    if not len(vectors):
        raise ValueError(f"none of the {len(files)} images can be read: {bad[0]}")
    readable = [image for i, image in enumerate(files) if i not in bad]
    _write(out, readable, vectors)
    skipped = [bad[i] for i in sorted(bad)]
    if skipped:
        atomic_write(skipped_file, json.dumps(skipped, indent=1).encode())
    else:
        skipped_file.unlink(missing_ok=True)
    count, dim = vectors.shape
    document = {"out": str(out), "images": count, "dim": dim, "skipped": skipped, "notes": notes}
    lines = truncate_lines([f"skipped {reason}" for reason in skipped], str(skipped_file))
    text = f"wrote {count} embeddings (dim {dim}) to {' and '.join(map(str, outputs))}"
    print_result(as_json, document, "\n".join([*notes, *lines, text]))


def _embed_vectors(
    folder: Path, words: Sequence[str], batch_size: int, flip: bool, device: str
) -> "npt.NDArray[np.float32] | None":
    """Return the embeddings of a file of vectors, if the embedder takes vectors."""
    from proximetry.data import VectorCatalog
    from proximetry.data.vectors import holds_vectors
    from proximetry.training.evaluator import check_input

    files = [file for word in words if (file := Path(word).expanduser()).is_file()]
    catalogs = [VectorCatalog.read(file) for file in files if holds_vectors(file)]
    if not catalogs:
        return None
    embedder = load_embedder(folder, device)
    for catalog in catalogs:
        check_input(embedder, catalog)
    if embedder.takes_images:  # the images of these vectors are embedded
        return None
    if len(words) > 1:
        raise UsageError(f"several files of vectors: {', '.join(words)}. Pass one at a time.")
    return embedder.encode(catalogs[0].vectors, batch_size, concat_flip=flip).numpy()


def _embed_files(
    world: "World",
    folder: Path,
    paths: Sequence[str],
    batch_size: int,
    flip: bool,
    skip: bool,
    progress: Progress,
) -> "tuple[npt.NDArray[np.float32], dict[int, str]]":
    """Return the vectors of the readable images, and the errors of the others by index.

    Each rank embeds a share of the batches that a single process would embed; all ranks return all
    vectors.
    """
    import torch.distributed as dist

    from proximetry._util.tensors import gather_rows
    from proximetry.metrics.distributed import gather_objects, raise_on_all_ranks

    group = dist.group.WORLD if world.size > 1 else None
    batches = -(-len(paths) // batch_size)
    first, last = (
        number * batches // world.size * batch_size for number in (world.rank, world.rank + 1)
    )
    bad: dict[int, str] = {}

    def embed_share() -> "Tensor":
        with skip_hint():
            return load_embedder(folder, str(world.device)).encode(
                paths[first:last],
                batch_size,
                concat_flip=flip,
                progress=lambda done: progress(min(world.size * done, len(paths)), len(paths)),
                on_error=(lambda i, error: bad.update({first + i: str(error)})) if skip else None,
            )

    vectors = raise_on_all_ranks(embed_share, group)
    if group is None:
        return vectors.numpy(), bad
    gathered, _ = gather_rows(vectors, group)
    for others in gather_objects(dict(bad), group):
        bad.update(others)
    return gathered.numpy(), bad


def _write(out: Path, images: "Sequence[ImageFile]", vectors: "npt.NDArray[np.float32]") -> None:
    """Write vectors with the absolute paths and labels of images; the suffix sets the format."""
    import numpy as np

    from proximetry.data.tables import text_array
    from proximetry.data.vectors import rows_file
    from proximetry.search.metadata import absolute

    columns: dict[str, list[Any]] = {"paths": [absolute(path) for path, _ in images]}
    if any(label for _, label in images):
        columns["labels"] = [label for _, label in images]
    buffer = io.BytesIO()
    if out.suffix.lower() == ".npz":
        texts: dict[str, Any] = {
            name: np.array([text or "" for text in column]) for name, column in columns.items()
        }
        np.savez(buffer, vectors=vectors, **texts)
    elif out.suffix.lower() == ".npy":
        atomic_write(rows_file(out), json.dumps(columns, indent=1).encode())
        np.save(buffer, vectors)
    else:
        import pyarrow as arrow  # type: ignore[import-untyped]
        from pyarrow import parquet

        arrays = {name[:-1]: text_array(values) for name, values in columns.items()}
        flat = arrow.array(vectors.ravel())
        arrays["vector"] = arrow.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
        parquet.write_table(arrow.table(arrays), buffer)
    atomic_write(out, buffer.getvalue())
