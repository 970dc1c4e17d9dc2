"""What lies in a folder of class folders, and what is taken to be what."""

import errno
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
# What archives, disks and file servers put beside one's own folders.
_STRAY = frozenset(
    ("__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information")
)

Names = tuple[str, ...]


class Scan(NamedTuple):
    """Images in sorted order, and what there is to say about them; see `Catalog`."""

    paths: Names
    labels: Names
    splits: Names
    layout: str
    notes: Names


def _about_ignored(names: list[str]) -> list[str]:
    unread = [name for name in names if name.lower().endswith(_UNREAD)]
    others = [name for name in names if not name.lower().endswith(_UNREAD)]
    told = [
        (unread, "of an unsupported image format; convert to JPEG or PNG"),
        (others, "that are not images in a class folder"),
    ]
    return [f"files {what} ({len(found)}): {some(found)}" for found, what in told if found]


def is_image(name: str) -> bool:
    """Tell by its name whether a file is meant to be an image."""
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS


def split_called(name: str) -> str | None:
    """Return the split that a folder of this name may stand for."""
    return _SPLITS.get(name.lower())


def class_folders(root: Path) -> list[Path]:
    """Return the visible sub-folders in sorted order."""
    return sorted(p for p in root.iterdir() if p.is_dir() and _is_own(p.name))


def images_below(folder: Path) -> tuple[list[str], list[str]]:
    """Return the paths of all images from a folder on, sorted, and what was left out."""
    paths, _, left_out = files_below(folder)
    return paths, left_out


def files_below(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Return the paths of images and of other files, each sorted, and what was left out."""
    tree = _Tree(folder)
    top, folders = tree.top()
    found = sorted([top, *tree.walk(folders)])
    paths = [(*home.parts, name) for home in found for name in home.files if is_image(name)]
    others = [home.path(name) for home in found for name in home.files if not is_image(name)]
    links = _links_to(paths, found)
    kept = ["/".join(path) for path in paths if path not in links]
    return kept, others, sorted([*tree.left_out, *links.values()])


def scan_folder(root: Path) -> Scan:
    """Find the images in class folders, which may lie in folders called train, val or test.

    Two such folders that hold class folders are splits, whatever lies beside them. A single one
    is, unless other folders hold images too: it might be a class, and that is not guessed at.
    Nothing is left out without being named.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected one sub-folder of images per class")
    tree = _Tree(root)
    top, folders = tree.top()
    homes = _split_folders(root, folders)
    for name in folders if homes else ():
        if name not in homes:
            tree.left_out.append(f"{name} (no class folders)" if split_called(name) else name)
    found = sorted(tree.walk(homes or folders))
    depth = 2 if homes else 1  # of class folders
    paths, ignored, full = [], [top.path(name) for name in top.files], set()
    for folder in found:
        for name in folder.files:
            if is_image(name) and len(folder.parts) >= depth:
                paths.append((*folder.parts, name))
                full.add(folder.parts[:depth])
            else:
                ignored.append(folder.path(name))
    links = _links_to(paths, found)
    paths = [path for path in paths if path not in links]
    if not paths:
        names = sorted(p.name for p in root.iterdir())
        raise ValueError(
            f"{root} holds no images in sub-folders; expected {root}/<class>/<image>.jpg, found "
            f"{some(names) or 'nothing'}"
        )
    empty = ["/".join(f.parts) for f in found if len(f.parts) == depth and f.parts not in full]
    notes = []
    if all(len(path) > depth + 1 for path in paths):
        notes.append(
            f"all images lie in folders below the class folders, as {'/'.join(paths[0])}; the "
            "outer ones are the classes"
        )
    notes += _about_ignored(ignored)
    if empty:
        notes.append(f"class folders without images ({len(empty)}): {some(empty)}")
    if links:
        notes.append(
            f"{len(links)} links lead to images that are there anyway and are left out: "
            f"{some(links.values())}"
        )
    splits = [split_called(path[0]) or "" if homes else "all" for path in paths]
    labels = [path[depth - 1] for path in paths]
    places = [f"{path[0]}/" if homes else "" for path in paths]
    return Scan(
        tuple("/".join(path) for path in paths),
        tuple(labels),
        tuple(splits),
        layout(by_place(zip(places, labels, strict=True)), sorted(tree.left_out)),
        tuple(notes),
    )


def _split_folders(root: Path, folders: Names) -> Names:
    """Return those of the folders that are splits."""
    homes = tuple(name for name in folders if split_called(name) and _holds_images(root, name, 2))
    if len(homes) != 1:
        return homes
    taken = os.path.realpath(root / homes[0])
    for name in folders:
        other = not split_called(name) and os.path.realpath(root / name) != taken
        if other and _holds_images(root, name, 1):
            raise ValueError(
                f"{root}: is {homes[0]}/ a split or a class? It holds folders of images as a "
                f"split does, but {name}/ beside it holds images too; move {name}/ elsewhere if "
                f"{homes[0]}/ is a split, or rename {homes[0]}/ if it is a class"
            )
    return homes


def _holds_images(root: Path, name: str, depth: int) -> bool:
    """Whether images lie in a folder of the root, so deep or deeper."""
    return any(
        len(folder.parts) >= depth and any(map(is_image, folder.files))
        for folder in _Tree(root).walk((name,))
    )


def by_place(rows: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Put together the classes of each split, in the words of its source, for `layout`."""
    classes: dict[str, set[str]] = {}
    for home, label in rows:
        classes.setdefault(home, set()).add(label)
    return classes


def layout(classes: Mapping[str, Collection[str]], left_out: Sequence[str] = ()) -> str:
    """Say in one sentence what was taken to be what.

    Args:
        classes: by split, in the words of its source, the classes in it.
        left_out: what was not taken for images of a class.
    """
    order = ["", *_SPLITS]
    told = []
    for home in sorted(classes, key=lambda home: order.index(home.lower().strip("/"))):
        names = classes[home]
        count = f"{len(names)} class{'es' if len(names) != 1 else ''}"
        told.append(f"{count} in {home}" if home else f"{count}: {some(sorted(names))}")
    return f"images: {', '.join(told) or 'none'}" + (
        f"; left out: {some(left_out)}" if left_out else ""
    )


def _is_own(name: str) -> bool:
    return not name.startswith(".") and name not in _STRAY


class _Folder(NamedTuple):
    """What lies in one folder.

    Attributes:
        parts: names of the folders from the root to this one.
        files: names of the visible files.
        real: the folder without links.
        links: where those files are that are links.
    """

    parts: Names
    files: list[str]
    real: str
    links: dict[str, str]

    def add(self, entry: "os.DirEntry[str]") -> None:
        """Take in a file unless it is hidden."""
        if not entry.name.startswith("."):
            self.files.append(entry.name)
            if entry.is_symlink():
                self.links[entry.name] = os.path.realpath(entry.path)

    def path(self, name: str) -> str:
        """The path of a file from the root on, with a word on links that lead nowhere."""
        path = "/".join((*self.parts, name))
        broken = name in self.links and not os.path.exists(self.links[name])
        return f"{path} (a broken link)" if broken else path


class _Tree:
    """The folders below a root, each visited once however many links lead to it."""

    def __init__(self, root: Path) -> None:
        self._root, self._real = root, os.path.realpath(root)
        # A link to the root, or to a folder around it, would lead here again.
        self._seen = {self._real, *map(str, Path(self._real).parents)}
        self.left_out: list[str] = []

    def top(self) -> tuple[_Folder, Names]:
        """Return the root's own files, and its folders."""
        folder, inner, links = self._open((), self._real)
        return folder, tuple(sorted(inner + links))

    def walk(self, starts: Iterable[str]) -> Iterator[_Folder]:
        """Give folders of the root and all below them, in no order.

        Links come last, so that a folder is found in its own place and not by a link to it.
        """
        ahead: list[tuple[Names, str]] = []
        links: list[Names] = []
        for name in starts:
            if os.path.islink(self._root / name):
                links.append((name,))
            else:
                ahead.append(((name,), os.path.join(self._real, name)))
        while ahead or links:
            if ahead:
                parts, real = ahead.pop()
            else:
                parts = links.pop(0)
                real = os.path.realpath(self._root.joinpath(*parts))
            if real in self._seen:
                self.left_out.append(f"{'/'.join(parts)} (leads to {self._inside(real)})")
                continue
            self._seen.add(real)
            folder, inner, more = self._open(parts, real)
            ahead += [((*parts, name), os.path.join(real, name)) for name in inner]
            links += [(*parts, name) for name in more]
            yield folder

    def _open(self, parts: Names, real: str) -> tuple[_Folder, list[str], list[str]]:
        """Return a folder with its files, the folders in it, and the links to folders."""
        found = _Folder(parts, [], real, {})
        folders: list[str] = []
        links: list[str] = []
        place = self._root.joinpath(*parts)
        try:
            with os.scandir(place) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
            for entry in entries:
                if not _is_folder(entry):
                    found.add(entry)
                elif _is_own(entry.name):
                    (links if entry.is_symlink() else folders).append(entry.name)
                else:
                    self.left_out.append("/".join((*parts, entry.name)))
        except OSError as error:
            raise OSError(
                f"{error.filename or place} cannot be read: {error.strerror}; make it readable, "
                f"or move it out of {self._root}"
            ) from error
        return found, folders, links

    def _inside(self, real: str) -> str:
        """A place as seen from the root, where it lies in it."""
        inside = real.startswith(self._real + os.sep)
        return os.path.relpath(real, self._real) if inside else real


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link that leads to itself is a broken one
            return False
        raise


def _links_to(paths: list[Names], found: list[_Folder]) -> dict[Names, str]:
    """Return those paths that are links to others of them, and a few words on each."""
    homes = {folder.parts: folder for folder in found}
    if not any(folder.links for folder in found):
        return {}
    taken: dict[str, Names] = {}
    links = []
    for path in paths:
        home = homes[path[:-1]]
        if path[-1] in home.links:
            links.append((path, home.links[path[-1]]))
        else:
            taken[os.path.join(home.real, path[-1])] = path
    copies = {}
    for path, target in links:
        if target in taken:
            copies[path] = f"{'/'.join(path)} (leads to {'/'.join(taken[target])})"
        taken.setdefault(target, path)
    return copies
