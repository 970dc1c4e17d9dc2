"""Scan a folder of class folders.

Links to folders are followed one level: class folders, and splits, may be links to other places.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from proximetry._util.errors import some

EXTENSIONS = frozenset(
    ".jpg .jpeg .png .webp .gif .tif .tiff .bmp .ppm .pgm .pbm .jp2 .avif".split()  # noqa: SIM905
)
# Of phones and cameras; Pillow does not read them.
_UNREAD = (".heic", ".heif", ".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
# Folders that archives, disks and file servers add.
_STRAY = frozenset(
    ("__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information")
)

Names = tuple[str, ...]


class Scan(NamedTuple):
    """Images in sorted order, and notes on them; see `Catalog`."""

    paths: Names
    labels: Names
    splits: Names
    layout: str
    notes: Names


def is_image(name: str) -> bool:
    """Return whether a file has the name of an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def split_called(name: str) -> str | None:
    """Return the split that a folder of this name may stand for."""
    return _SPLITS.get(name.lower())


def class_folders(root: Path) -> list[Path]:
    """Return the visible sub-folders in sorted order."""
    return [root / name for name in _subfolders(root, (), [])]


def images_below(folder: Path) -> tuple[list[str], list[str]]:
    """Return the sorted paths of all images below a folder, and what was skipped."""
    paths, _, skipped = files_below(folder)
    return paths, skipped


def files_below(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the sorted paths of images and of other files below a folder, and what was skipped."""
    skipped: list[str] = []
    paths = [(parts, name) for parts, names in _walk(folder, (), skipped) for name in names]
    images, others = (
        ["/".join((*parts, name)) for parts, name in paths if is_image(name) == image]
        for image in (True, False)
    )
    return images, others, sorted(skipped)


def scan_folder(root: Path) -> Scan:
    """Find the images in class folders, which may lie in folders called train, val or test.

    Two such folders that hold class folders are splits. A single one is, unless other folders hold
    images too: it might be a class, which is an error. Skipped files and folders are named.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected one sub-folder of images per class")
    skipped: list[str] = []
    folders = _subfolders(root, (), skipped)
    splits = _split_folders(root, folders)
    for name in folders if splits else ():
        if name not in splits:
            skipped.append(f"{name} (no class folders)" if split_called(name) else name)
    homes: list[Names] = [(split,) for split in splits] or [()]
    ignored = [name for name in _files(root) if not name.startswith(".")]
    ignored += ["/".join((*home, name)) for home in homes if home for name in _files(root, home)]
    paths: list[Names] = []
    empty: list[str] = []
    for home in homes:
        for name in _subfolders(root, home, skipped) if home else folders:
            count = len(paths)
            for parts, names in _walk(root, (*home, name), skipped):
                paths += [(*parts, file) for file in names if is_image(file)]
                ignored += ["/".join((*parts, file)) for file in names if not is_image(file)]
            if len(paths) == count:
                empty.append("/".join((*home, name)))
    if not paths:
        names = sorted(p.name for p in root.iterdir())
        raise ValueError(
            f"{root} holds no images in sub-folders; expected {root}/<class>/<image>.jpg, found "
            f"{some(names) or 'nothing'}"
        )
    depth = 2 if splits else 1  # of class folders
    notes = []
    if all(len(path) > depth + 1 for path in paths):
        notes.append(
            f"all images lie in folders below the class folders, as {'/'.join(paths[0])}; the "
            "outer ones are the classes"
        )
    notes += _ignored_notes(ignored)
    if empty:
        notes.append(f"class folders without images ({len(empty)}): {some(empty)}")
    classes = by_place((f"{path[0]}/" if splits else "", path[depth - 1]) for path in paths)
    return Scan(
        tuple("/".join(path) for path in paths),
        tuple(path[depth - 1] for path in paths),
        tuple(split_called(path[0]) or "" if splits else "all" for path in paths),
        layout(classes, sorted(skipped)),
        tuple(notes),
    )


def _ignored_notes(names: list[str]) -> Iterator[str]:
    for unread, what in (
        (True, "of an unsupported image format; convert to JPEG or PNG"),
        (False, "that are not images in a class folder"),
    ):
        files = [name for name in names if name.lower().endswith(_UNREAD) == unread]
        if files:
            yield f"files {what} ({len(files)}): {some(files)}"


def _split_folders(root: Path, folders: Sequence[str]) -> list[str]:
    """Return those of the folders that are splits."""

    def holds_images(*start: str) -> bool:
        return any(any(map(is_image, files)) for _, files in _walk(root, start, []))

    splits = [
        name
        for name in folders
        if split_called(name)
        and any(holds_images(name, below) for below in _subfolders(root, (name,), []))
    ]
    for name in folders if len(splits) == 1 else ():
        if not split_called(name) and holds_images(name):
            raise ValueError(
                f"{root}: is {splits[0]}/ a split or a class? It holds folders of images as a "
                f"split does, but {name}/ beside it holds images too; move {name}/ elsewhere if "
                f"{splits[0]}/ is a split, or rename {splits[0]}/ if it is a class"
            )
    return splits


def by_place(rows: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Return the classes of each split, for `layout`."""
    classes: dict[str, set[str]] = {}
    for home, label in rows:
        classes.setdefault(home, set()).add(label)
    return classes


def layout(classes: Mapping[str, Collection[str]], skipped: Sequence[str] = ()) -> str:
    """Describe the classes by split, and what was skipped, in one sentence."""
    order = ["", *_SPLITS]
    parts = []
    for home in sorted(classes, key=lambda home: order.index(home.lower().strip("/"))):
        names = classes[home]
        count = f"{len(names)} class{'es' if len(names) != 1 else ''}"
        parts.append(f"{count} in {home}" if home else f"{count}: {some(sorted(names))}")
    return f"images: {', '.join(parts) or 'none'}" + (
        f"; skipped: {some(skipped)}" if skipped else ""
    )


def _subfolders(root: Path, parts: Names, skipped: list[str]) -> list[str]:
    """Return the names of visible folders in a folder of the root, sorted; links included."""
    folder, real = root.joinpath(*parts), os.path.realpath(root)
    names = []
    for name in sorted(_listed(folder)):
        path = os.path.join(folder, name)
        if not os.path.isdir(path):
            continue
        target = os.path.realpath(path)
        loops = os.path.commonpath([real, target]) in (real, target)
        if name.startswith(".") or name in _STRAY:
            skipped.append("/".join((*parts, name)))
        elif os.path.islink(path) and loops:
            skipped.append(f"{'/'.join((*parts, name))} (a link to {target})")
        else:
            names.append(name)
    return names


def _files(root: Path, parts: Names = ()) -> list[str]:
    folder = root.joinpath(*parts)
    return sorted(n for n in _listed(folder) if not n.startswith(".") and not (folder / n).is_dir())


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError as error:
        raise _unreadable(error) from error


def _walk(root: Path, start: Names, skipped: list[str]) -> Iterator[tuple[Names, list[str]]]:
    """Yield the folders below ``start``, itself included, and the visible files of each."""
    real = os.path.realpath(root)

    def fail(error: OSError) -> None:
        raise _unreadable(error) from error

    for folder, folders, files in os.walk(root.joinpath(*start), onerror=fail, followlinks=False):
        parts = Path(folder).relative_to(root).parts
        below = sorted(folders)
        folders.clear()
        for name in below:
            if name.startswith(".") or name in _STRAY:
                skipped.append("/".join((*parts, name)))
            elif os.path.islink(os.path.join(folder, name)):
                skipped.append(f"{'/'.join((*parts, name))} (a link to a folder)")
            else:
                folders.append(name)
        visible = []
        for name in sorted(files):
            path = os.path.join(folder, name)
            if name.startswith("."):
                continue
            target = os.path.realpath(path) if os.path.islink(path) else ""
            if target.startswith(real + os.sep) and os.path.exists(path):
                skipped.append(f"{'/'.join((*parts, name))} (a link to {target})")
            else:
                visible.append(name)
        yield parts, visible


def _unreadable(error: OSError) -> OSError:
    return OSError(
        f"{error.filename} cannot be read: {error.strerror}. Make it readable, or move it away."
    )
