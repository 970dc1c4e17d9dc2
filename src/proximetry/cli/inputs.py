"""Inputs of commands: embedders, galleries, datasets."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from proximetry.cli.output import progress_bar

if TYPE_CHECKING:
    from proximetry.data import Catalog
    from proximetry.models import Embedder
    from proximetry.search import Gallery
    from proximetry.training.distributed import World


@contextmanager
def processes(device: str | None, *, float64: bool = True) -> "Iterator[World]":
    """Join the processes that torchrun started, if any; arguments as in `resolve_device`."""
    import torch

    from proximetry.training.distributed import join_processes, process_group

    world = join_processes(device, float64=float64)
    current = world.device if world.device.type == "cuda" else -1  # for NCCL; -1: no change
    with torch.cuda.device(current), process_group(world):
        yield world


def load_embedder(source: Path, device: str | None) -> "Embedder":
    """Load an embedder from any source of `Embedder.load`."""
    from proximetry.models import Embedder

    return Embedder.load(source, device)


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


def open_gallery(gallery: str, model: Path | None) -> "Gallery":
    """Open a gallery, with the embedder of ``model`` if it is not None."""
    from proximetry.search.manifest import is_milvus, read_manifest

    if not is_milvus(gallery):
        read_manifest(Path(gallery))  # reports a missing gallery before torch is imported
    from proximetry.search import Gallery
    from proximetry.search.indexing import load_model
    from proximetry.search.manifest import ignore

    return Gallery.open(
        gallery, None if model is None else load_model(model, gallery, None, ignore)
    )
