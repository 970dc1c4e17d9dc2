"""What lies in a folder of class folders."""

import os
from collections.abc import Iterator
from pathlib import Path

from proximetry._common import some

EXTENSIONS = frozenset(
    ".jpg .jpeg .png .webp .gif .tif .tiff .bmp .ppm .pgm .pbm .jp2 .avif".split()  # noqa: SIM905
)
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

Names = tuple[str, ...]


def is_image(name: str) -> bool:
    """Tell by its name whether a file is meant to be an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def class_folders(root: Path) -> list[Path]:
    """Return the visible sub-folders in sorted order."""
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def scan_folder(root: Path) -> tuple[Names, Names, Names, Names]:
    """Return sorted paths, labels, splits, and notes; see Catalog.from_folder."""
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected one sub-folder of images per class")
    rows: list[tuple[str, str, str]] = []
    ignored: list[str] = []
    empty: list[str] = []
    for split, home in _split_folders(root):
        visible = [p for p in sorted(home.iterdir()) if not p.name.startswith(".")]
        ignored += [p.relative_to(root).as_posix() for p in visible if p.is_file()]
        for folder in class_folders(home):
            before = len(rows)
            for path in files_below(folder):
                relative = path.relative_to(root).as_posix()
                if is_image(path.name):
                    rows.append((relative, folder.name, split))
                else:
                    ignored.append(relative)
            if len(rows) == before:
                empty.append(folder.relative_to(root).as_posix())
    if not rows:
        raise ValueError(
            f"{root} holds no images in sub-folders; expected {root}/<class>/<image>.jpg, found "
            f"{some([p.name for p in sorted(root.iterdir())]) or 'nothing'}"
        )
    notes = []
    if ignored:
        notes.append(f"{len(ignored)} files are not images in a class folder: {some(ignored)}")
    if empty:
        notes.append(f"{len(empty)} class folders hold no images: {some(empty)}")
    paths, labels, parts = zip(*rows, strict=True)
    return paths, labels, parts, tuple(notes)


def _split_folders(root: Path) -> list[tuple[str, Path]]:
    """Return the folders of the splits, if the sub-folders are such and hold class folders."""
    inner = class_folders(root)
    if inner and all(p.name.lower() in _SPLITS and class_folders(p) for p in inner):
        return [(_SPLITS[p.name.lower()], p) for p in inner]
    return [("all", root)]


def files_below(folder: Path) -> Iterator[Path]:
    """Give the visible files of a folder and of its sub-folders, in sorted order."""
    for home, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(home, name)
