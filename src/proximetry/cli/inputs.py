"""Inputs of commands: embedders, galleries, and the images named on the command line."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first
from proximetry.cli.output import progress_bar

if TYPE_CHECKING:
    from proximetry.data import Catalog
    from proximetry.models import Embedder
    from proximetry.search import Gallery
    from proximetry.training.distributed import World

Image = tuple[str, str | None]
"""A path, and the class if the image comes from a folder of class folders or a table."""


@contextmanager
def processes(device: str | None) -> "Iterator[World]":
    """Join the processes that torchrun started, if any, while the block runs."""
    import torch

    from proximetry.training.distributed import join_processes, process_group

    world = join_processes(device)
    current = world.device if world.device.type == "cuda" else -1  # for NCCL; -1: no change
    with torch.cuda.device(current), process_group(world):
        yield world


def load_embedder(source: Path, device: str | None) -> "Embedder":
    """Load an embedder from its folder, the folder of a run, or hub:owner/name."""
    from proximetry._util.machine import resolve_device
    from proximetry.models.hub import load_embedder as load

    return load(source, resolve_device(device))


def open_images(
    name: str,
    root: Path | None,
    columns: Mapping[str, str] | None,
    allow_missing: bool,
    labels_from_name: str | None = None,
) -> "Catalog":
    """Open a dataset or a table, with a progress bar while its images are listed."""
    from proximetry.data import open_dataset

    with progress_bar("listing images") as report:
        return open_dataset(
            name,
            root,
            columns=columns,
            labels_from_name=labels_from_name,
            allow_missing=allow_missing,
            progress=report,
        )


def check_exists(path: Path) -> None:
    """Reject a path that does not exist."""
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}. Check the path.")


def find_catalog(
    path: Path, columns: Mapping[str, str] | None = None, *, allow_missing: bool = False
) -> "Catalog | None":
    """Return the catalog of a table, a tar file or a dataset; None for an image or a folder."""
    from proximetry.data import resolve_source
    from proximetry.data.folders import is_image

    check_exists(path)
    if path.is_file() and is_image(path.name):
        return None
    name, root = resolve_source(path.absolute())  # a path, even if a dataset has this name
    return None if name == "folder" else open_images(name, root, columns, allow_missing)


def find_images(
    words: Iterable[str], columns: Mapping[str, str] | None = None, *, allow_missing: bool = False
) -> tuple[list[Image], list[str]]:
    """Return the images in files, folders, tables and shards, and notes on them."""
    from proximetry.data.folders import images_below, scan_folder

    images, notes = list[Image](), list[str]()
    for word in words:
        path = Path(word).expanduser()
        catalog = find_catalog(path, columns, allow_missing=allow_missing)
        if catalog is not None:
            files = [catalog.file(row) for row in range(len(catalog))]
            images += zip(files, catalog.labels, strict=True)
            notes += catalog.remarks()
            continue
        if path.is_file():
            images.append((str(path), None))
            continue
        names, skipped = images_below(path)
        notes += [f"skipped in {path}: {join_first(skipped)}"] if skipped else []
        labels: dict[str, str] = {}
        if names and all("/" in name for name in names):  # all in class folders
            try:
                scanned = scan_folder(path)
                labels = dict(zip(scanned.paths, scanned.labels, strict=True))
            except ValueError as error:
                notes.append(f"without classes: {error}")
        images += [(str(path / name), labels.get(name)) for name in names]
    return images, notes


def open_gallery(gallery: str, model: Path | None) -> "Gallery":
    """Open a gallery, with an embedder of its images."""
    from proximetry.search.manifest import is_milvus, read_manifest

    if not is_milvus(gallery):
        read_manifest(Path(gallery))  # reports a wrong name before torch is imported
    from proximetry.search import Gallery

    return Gallery.open(gallery, None if model is None else load_image_embedder(model, None))


def load_image_embedder(model: Path, device: str | None) -> "Embedder":
    """Load an embedder of images, for galleries."""
    embedder = load_embedder(model, device)
    if not embedder.takes_images:
        raise UsageError(
            f"{model} takes {embedder.preprocessing}, not images. Pass an embedder of images."
        )
    return embedder
