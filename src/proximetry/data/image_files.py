"""Find the images in files, folders, tables and tar files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first
from proximetry._util.types import Progress
from proximetry.data.catalog import Catalog
from proximetry.data.datasets import open_dataset, resolve_source
from proximetry.data.folders import images_below, is_image, scan_folder

ImageFile = tuple[str, str | None]
"""A path, and the class if the image comes from a folder of class folders or a table."""


def check_exists(path: Path) -> None:
    """Reject a path that does not exist."""
    if not path.exists():
        raise UsageError(f"no such file or folder: {path}. Check the path.")


def find_catalog(
    path: Path,
    columns: Mapping[str, str] | None = None,
    *,
    allow_missing: bool = False,
    progress: Progress | None = None,
) -> Catalog | None:
    """Return the catalog of a table, a tar file or a dataset; None for an image or a folder."""
    check_exists(path)
    if path.is_file() and is_image(path.name):
        return None
    name, root = resolve_source(path.absolute())  # a path, even if a dataset has this name
    if name == "folder":
        return None
    return open_dataset(name, root, columns=columns, allow_missing=allow_missing, progress=progress)


def find_images(
    sources: Iterable[str],
    columns: Mapping[str, str] | None = None,
    *,
    allow_missing: bool = False,
    progress: Progress | None = None,
) -> tuple[list[ImageFile], list[str]]:
    """Return the images in files, folders, tables and shards, and notes on them."""
    images, notes = list[ImageFile](), list[str]()
    for source in sources:
        path = Path(source).expanduser()
        catalog = find_catalog(path, columns, allow_missing=allow_missing, progress=progress)
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
