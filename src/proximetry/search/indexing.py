"""`index`: build a gallery of images, or add new images to it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int
from proximetry._util.types import Progress
from proximetry.data import Catalog
from proximetry.data.vectors import is_vector_file
from proximetry.models import Embedder
from proximetry.models.weights import packaged_backbone
from proximetry.search import metadata
from proximetry.search.gallery import Gallery
from proximetry.search.manifest import EMBEDDER, GALLERY, MANIFEST, Report, is_milvus
from proximetry.search.new_images import BadImages
from proximetry.search.sync import Changes

Model: TypeAlias = Embedder | str | os.PathLike[str] | None
"""An embedder, a source of `Embedder.load`, or None."""


def index(
    images: Catalog | str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    model: Model = None,
    *,
    index: str | None = None,
    sync: bool = False,
    columns: Mapping[str, str] | None = None,
    bad_images: BadImages = "error",
    batch_size: int = 64,
    device: str | None = None,
    progress: Progress | None = None,
    report: Report = print,
) -> Gallery:
    """Build a gallery of images, or add the new images to an existing gallery.

    Args:
        images: a folder, image file, CSV or Parquet table or tar file, several of these, or a
            catalog; or a .parquet, .npz or .npy file of vectors with any other columns, such as
            `proximetry embed` writes, which are not embedded again.
        out: folder or Milvus address of the gallery; by default the folder "gallery".
        model: an embedder, or any source of `Embedder.load`. By default the gallery's embedder or,
            for a new gallery, a pretrained network from an installed package.
        index: as in `Gallery.build`; None is "auto", or the index of the gallery.
        sync: also update changed and moved files, and remove missing ones (`Gallery.sync`).
        columns: a table's column names by field if they differ, as in ``{"path": "file"}``.
        bad_images: "error" stops at unreadable images, "skip" lists them in `Gallery.skipped`.
        batch_size: images per forward pass.
        device: such as "cpu" or "cuda:1"; None chooses the best available.
        progress: called with (done, total) while images are embedded and indexed.
        report: called with messages, such as the network and the index.

    Examples:
        >>> from PIL import Image
        >>> from proximetry import Embedder, index
        >>> for color in ("red", "green", "blue"):
        ...     Image.new("RGB", (32, 32), color).save(f"{color}.png")
        >>> embedder = Embedder.create("small_convnet", 8, weights="none", image_size=32)
        >>> gallery = index(["red.png", "green.png", "blue.png"], model=embedder)
        index: auto → Flat for 3 images: every search is exact
        >>> gallery.search("green.png", k=1).ids
        array([[1]])
    """
    sources: Sequence[str | os.PathLike[str]] = []
    from proximetry.search.vector_files import index_vectors  # imports this module

    out = GALLERY if out is None else out
    if isinstance(images, str | os.PathLike) and is_vector_file(images):
        return index_vectors(
            *(Path(images), out, model, index, device),
            batch_size=batch_size,
            progress=progress,
            report=report,
        )[0]
    if isinstance(images, Catalog):
        table = metadata.from_images(images)
    else:
        sources = [images] if isinstance(images, str | os.PathLike) else images
        table, notes = metadata.from_sources(
            sources, columns, allow_missing=bad_images == "skip", progress=progress
        )
        for note in notes:
            report(note)
    options: dict[str, Any] = {"bad_images": bad_images, "batch_size": batch_size}
    options |= {"progress": progress, "report": report}
    folders = [*filter(os.path.isdir, map(os.path.expanduser, sources))] if sync else None
    return index_table(table, out, model, index, device, folders, **options)[0]


def index_table(
    table: Any,
    out: str | os.PathLike[str],
    model: Model,
    index: str | None,
    device: str | None,
    folders: Sequence[str | os.PathLike[str]] | None,
    **options: Any,
) -> tuple[Gallery, Changes]:
    """Build a gallery of a table of images, or update it; return it and what has changed."""
    if not is_gallery(out):
        embedder = load_model(model, out, device, options["report"])
        gallery = Gallery.build(embedder, table, out, index or "auto", **options)
        return gallery, Changes(len(gallery))
    load = model is not None or (device is not None and not is_milvus(out))
    gallery = Gallery.open(out, load_model(model, out, device, options["report"]) if load else None)
    if index not in (None, gallery.index) and (index, gallery.index) != ("auto", "BFlat"):
        raise UsageError(
            f"the gallery {out} was built with --index {gallery.index}. Omit --index, or choose "
            "another --gallery."
        )
    return gallery, update(gallery, table, folders, **options)


def update(
    gallery: Gallery,
    table: Any,
    folders: Sequence[str | os.PathLike[str]] | None,
    **options: Any,
) -> Changes:
    """Add the new images of a table to a gallery; with folders, synchronize these."""
    gallery.skipped = []
    if folders is not None:
        changes = gallery.sync(table, folders=folders, **options)
    else:
        is_indexed = gallery.contains(metadata.values(table["path"]))
        if any(is_indexed):
            options["report"](f"{format_int(sum(is_indexed))} images are already in {gallery.name}")
        if all(is_indexed):
            return Changes()
        rows = [row for row, done in enumerate(is_indexed) if not done]
        new = table.take(metadata.arrow().array(rows))
        changes = Changes(len(gallery.add(new, **options)))
    if gallery.needs_compaction:
        gallery.compact(progress=options["progress"], report=options["report"])
    return changes


def is_gallery(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a gallery in a folder or at an address on Milvus."""
    if is_milvus(path):
        from proximetry.search import milvus

        return milvus.find(path) is not None
    return (Path(path) / MANIFEST).exists()


def load_model(
    model: Model,
    out: str | os.PathLike[str],
    device: str | None,
    report: Report,
    *,
    takes_images: bool = True,
) -> Embedder:
    """Return the embedder for a gallery: `model`, else the gallery's, else a pretrained one.

    With `takes_images`, raise UsageError for an embedder of vectors.
    """
    if model is None:
        stored = Path(out) / EMBEDDER
        model = stored if is_gallery(out) and stored.exists() else packaged_backbone()
    embedder = model if isinstance(model, Embedder) else Embedder.load(model, device)
    if takes_images and not embedder.takes_images:
        name = "the embedder" if isinstance(model, Embedder) else model
        raise UsageError(
            f"{name} takes {embedder.preprocessing}, not images. Pass an embedder of images."
        )
    if embedder.recipe is None and embedder.weights.source in ("package", "hub"):
        report(
            f"model: {embedder.architecture.backbone} with pretrained weights, "
            f"{embedder.weights.origin} ({embedder.dim} dimensions)"
        )
    return embedder
