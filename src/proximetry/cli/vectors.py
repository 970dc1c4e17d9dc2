"""Images to embed, by what was named, and the files that embeddings are written to."""

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import Progress, UsageError, need, some
from proximetry._util.files import atomic_write
from proximetry._util.tensors import gather_rows
from proximetry.cli.output import advice_to_skip, progress_bar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from proximetry.data import Catalog
    from proximetry.models import Embedder
    from proximetry.training.distributed import World

Image = tuple[str, str | None]
"""A path, and the class where the image comes from a folder of class folders or a table."""


def load_embedder(place: Path, device: str | None) -> "Embedder":
    """Read an embedder, given its folder, that of the run that saved it, or hub:owner/name."""
    from proximetry._util.machine import resolve_device
    from proximetry.models.hub import load_embedder as load

    return load(place, resolve_device(device))


def open_images(
    name: str, root: Path | None, columns: Mapping[str, str] | None, allow_missing: bool
) -> "Catalog":
    """Open a dataset or a table, with a bar while its images are looked for."""
    from proximetry.data import open_dataset

    with progress_bar("looking for the images") as report:
        return open_dataset(
            name, root, columns=columns, allow_missing=allow_missing, progress=report
        )


def check_alone(file: Path) -> None:
    """Refuse anything but a file of vectors where no embedder is named."""
    from proximetry.data.vectors import COLUMN, SUFFIXES, holds_vectors, parquet_columns

    if file.is_file() and holds_vectors(file):
        return
    columns = parquet_columns(file) if file.suffix.lower() == ".parquet" else ()
    if columns:
        raise UsageError(
            f"{file} has no column {COLUMN!r} that holds lists of numbers; it has {some(columns)}"
        )
    raise UsageError(
        f"{file} is no file of vectors ({', '.join(SUFFIXES)}), and without images there is "
        "nothing to evaluate: proximetry evaluate EMBEDDER IMAGES, or proximetry evaluate "
        "VECTORS"
    )


def embed_vectors(
    folder: Path, words: Sequence[str], batch_size: int, flip: bool, device: str
) -> "tuple[npt.NDArray[np.float32], dict[int, str]] | None":
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
    if embedder.takes_images:  # those that the vectors are of
        return None
    if len(words) > 1:
        raise UsageError("one file of vectors at a time, please")
    return embedder.encode(catalogs[0].vectors, batch_size, concat_flip=flip).numpy(), {}


def find_images(
    words: Iterable[str], columns: Mapping[str, str] | None = None, *, allow_missing: bool = False
) -> tuple[list[Image], list[str]]:
    """Return the images that are meant by files, folders, tables and shards, and notes on them."""
    images: list[Image] = []
    notes: list[str] = []
    for word in words:
        found, more = _images_of(Path(word).expanduser(), columns, allow_missing)
        images += found
        notes += more
    return images, notes


def check_there(path: Path) -> None:
    """Refuse what is not there."""
    if not path.exists():
        raise UsageError(f"there is no image or folder {path}")


def find_catalog(
    path: Path, columns: Mapping[str, str] | None = None, *, allow_missing: bool = False
) -> "Catalog | None":
    """Return the catalogue of a table, a tar file or a dataset; None for an image or a folder."""
    from proximetry.data import resolve_source
    from proximetry.data.folders import is_image

    check_there(path)
    if path.is_file() and is_image(path.name):
        return None
    name, root = resolve_source(path.absolute())  # a path, even if it is called like a dataset
    return None if name == "folder" else open_images(name, root, columns, allow_missing)


def _images_of(
    path: Path, columns: Mapping[str, str] | None, allow_missing: bool
) -> tuple[list[Image], list[str]]:
    catalog = find_catalog(path, columns, allow_missing=allow_missing)
    if catalog is None:
        return _images_below(path) if path.is_dir() else ([(str(path), None)], [])
    files = [catalog.file(row) for row in range(len(catalog))]
    return list(zip(files, catalog.labels, strict=True)), catalog.remarks()


def _images_below(folder: Path) -> tuple[list[Image], list[str]]:
    """All images of a folder, with classes if all of them lie in class folders."""
    from proximetry.data.folders import images_below, scan_folder

    paths, left_out = images_below(folder)
    notes = [f"left out in {folder}: {some(left_out)}"] if left_out else []
    labels: dict[str, str] = {}
    if paths and all("/" in path for path in paths):
        try:
            found = scan_folder(folder)
            labels = dict(zip(found.paths, found.labels, strict=True))
        except ValueError as error:
            notes.append(f"without classes: {error}")
    return [(str(folder / path), labels.get(path)) for path in paths], notes


def embed_files(
    world: "World",
    folder: Path,
    paths: Sequence[str],
    batch_size: int,
    flip: bool,
    skip: bool,
    progress: Progress,
) -> "tuple[npt.NDArray[np.float32], dict[int, str]]":
    """Return the vectors of images, and why those without one could not be read.

    Of several ranks each embeds some of the batches, which are those of one process; all of them
    get everything.
    """
    import torch.distributed as dist

    from proximetry.metrics.distributed import gather_objects, together

    group = dist.group.WORLD if world.size > 1 else None
    batches = -(-len(paths) // batch_size)
    first, last = (
        number * batches // world.size * batch_size for number in (world.rank, world.rank + 1)
    )
    bad: dict[int, str] = {}

    def embed() -> "Tensor":
        with advice_to_skip():
            return load_embedder(folder, str(world.device)).encode(
                paths[first:last],
                batch_size,
                concat_flip=flip,
                progress=lambda done: progress(min(world.size * done, len(paths)), len(paths)),
                on_error=(lambda i, error: bad.update({first + i: str(error)})) if skip else None,
            )

    vectors = together(embed, group)
    if group is None:
        return vectors.numpy(), bad
    whole, _ = gather_rows(vectors, group)
    for found in gather_objects(dict(bad), group):
        bad.update(found)
    return whole.numpy(), bad


@dataclass(frozen=True)
class Embedded:
    """Embeddings and the images they belong to."""

    images: Sequence[Image]
    vectors: "npt.NDArray[np.float32]"

    @property
    def paths(self) -> list[str]:
        """The path of each image."""
        return [path for path, _ in self.images]

    @property
    def labels(self) -> list[str | None]:
        """The class of each image; nothing if none is known."""
        labels = [label for _, label in self.images]
        return labels if any(labels) else []


def _npz(embedded: Embedded, out: Path) -> None:
    import numpy as np

    arrays: dict[str, Any] = {"vectors": embedded.vectors, "paths": np.array(embedded.paths)}
    if embedded.labels:
        arrays["labels"] = np.array([label or "" for label in embedded.labels])
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    atomic_write(out, buffer.getvalue())


def _npy(embedded: Embedded, out: Path) -> None:
    import numpy as np

    from proximetry.data.vectors import rows_file

    beside = {"paths": embedded.paths} | ({"labels": embedded.labels} if embedded.labels else {})
    atomic_write(rows_file(out), json.dumps(beside, indent=1).encode())
    buffer = io.BytesIO()
    np.save(buffer, embedded.vectors)
    atomic_write(out, buffer.getvalue())


def _parquet(embedded: Embedded, out: Path) -> None:
    from proximetry.data.tables import text_array

    arrow = need("pyarrow", "images", "Writing Parquet")
    parquet = need("pyarrow.parquet", "images", "Writing Parquet")
    flat = arrow.array(embedded.vectors.ravel())
    columns = {"path": text_array(embedded.paths)}
    if embedded.labels:
        columns["label"] = text_array(embedded.labels)
    columns["vector"] = arrow.FixedSizeListArray.from_arrays(flat, embedded.vectors.shape[1])
    buffer = io.BytesIO()
    parquet.write_table(arrow.table(columns), buffer)
    atomic_write(out, buffer.getvalue())


WRITERS: dict[str, Callable[[Embedded, Path], None]] = {
    ".npz": _npz,
    ".npy": _npy,
    ".parquet": _parquet,
}


def find_writer(out: Path) -> tuple[Callable[[Embedded, Path], None], list[Path]]:
    """Return what writes this kind of file, and the files it writes."""
    from proximetry.data.vectors import rows_file

    if out.suffix not in WRITERS:
        raise UsageError(f"--out {out} must end in {', '.join(WRITERS)}")
    if out.suffix == ".parquet":
        need("pyarrow", "images", "Writing Parquet")
    written = [out, rows_file(out)] if out.suffix == ".npy" else [out]
    return WRITERS[out.suffix], written


def left_out_file(out: Path) -> Path:
    """The file beside embeddings that lists the images that have none."""
    return out.with_name(f"{out.name}.left_out.json")


def write_left_out(out: Path, reasons: Sequence[str]) -> None:
    """List the images without embeddings beside those of the others; if there are none, nothing."""
    if reasons:
        atomic_write(left_out_file(out), json.dumps(list(reasons), indent=1).encode())
    else:
        left_out_file(out).unlink(missing_ok=True)
