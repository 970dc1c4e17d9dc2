"""Scan images in folders of class folders and in tar shards ("shard.tar::class/image.webp").

Class folders and splits may be links to other folders; deeper links are not followed. Tar files are
not unpacked: one pass over their headers gives the offset of every member.
"""

import errno
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from proximetry._util.formatting import format_value, join_first
from proximetry.data.image_pairs import read_image_pairs

SEPARATOR = "::"
_CONTAINER = re.compile(rf"(.*?\.(?:tar|bin|rec)){SEPARATOR}(.*)", re.DOTALL)
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
EXTENSIONS = frozenset(
    ".jpg .jpeg .png .webp .gif .tif .tiff .bmp .ppm .pgm .pbm .jp2 .avif "  # noqa: SIM905
    ".heic .heif".split()
)
# Formats of cameras, which Pillow does not read.
_RAW = (".jxl", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf")
_SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
# Folders of archives, disks and file servers.
_SYSTEM_FOLDERS = {"__MACOSX", "lost+found", "@eaDir", "$RECYCLE.BIN", "System Volume Information"}

# "boxer_12", "boxer-12", "great dane (3)": the class, a separator, a number.
_NUMBERED = re.compile(r"(.+?)[\s_.-]*(?:[\s_.-]\d+|\(\d+\))")

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


def class_folders(root: Path) -> list[Path]:
    """Return the visible sub-folders in sorted order."""
    return [root / name for name in _entries(root, (), [], outer=True)[0]]


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

    Such folders with class folders in them are splits. If there is only one, no folder beside it
    may contain images. Skipped files and folders are listed.
    """
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected one sub-folder of images per class")
    skipped: list[str] = []
    folders, ignored = _entries(root, (), skipped, outer=True)
    splits = _split_folders(root, folders)
    classes: list[Names] = [(name,) for name in folders]
    if splits:
        classes = []
        for name in folders:
            if name in splits:
                names, files = _entries(root, (name,), skipped, outer=True)
                classes += [(name, below) for below in names]
                ignored += [f"{name}/{file}" for file in files]
            else:
                empty_split = name.lower() in _SPLITS
                skipped.append(f"{name} (no class folders)" if empty_split else name)
    paths: list[Names] = []
    empty: list[str] = []
    for start in classes:
        count = len(paths)
        for parts, files in _walk(root, start, skipped):
            paths += [(*parts, file) for file in files if is_image(file)]
            ignored += ["/".join((*parts, file)) for file in files if not is_image(file)]
        if len(paths) == count:
            empty.append("/".join(start))
    if not paths:
        names = sorted(p.name for p in root.iterdir())
        raise ValueError(
            f"{root} holds no images in sub-folders; expected {root}/<class>/<image>.jpg, found "
            f"{join_first(names) or 'nothing'}{_flat_hint(root)}"
        )
    depth = 2 if splits else 1  # of class folders
    notes = []
    if all(len(path) > depth + 1 for path in paths):
        notes.append(
            f"all images lie in folders below the class folders, as {'/'.join(paths[0])}; the "
            "outer ones are the classes"
        )
    raw = [name for name in ignored if name.lower().endswith(_RAW)]
    others = [name for name in ignored if not name.lower().endswith(_RAW)]
    for what, names in (
        ("files of an unsupported image format; convert to JPEG or PNG", raw),
        ("files that are not images in a class folder", others),
        ("class folders without images", empty),
    ):
        if names:
            notes.append(f"{what} ({len(names)}): {join_first(names)}")
    return Scan(
        tuple("/".join(path) for path in paths),
        tuple(path[depth - 1] for path in paths),
        tuple(splits.get(path[0], "all") for path in paths),
        layout(((f"{path[0]}/" if splits else "", path[depth - 1]) for path in paths), skipped),
        tuple(notes),
    )


def _flat_hint(root: Path) -> str:
    """Return how to label images that are not in class folders, "" if there are none."""
    if not images_below(root)[0]:
        return ""
    return (
        ". For images without class folders, pass a CSV table with columns path,label, or "
        "--data.labels-from-name auto if their names begin with the class"
    )


def label_of_name(name: str, rule: str) -> str:
    """Return the class in the name of an image, "" if there is none.

    ``auto`` takes the text before the last separator and number: boxer in boxer_12.jpg. Any other
    rule is a regular expression to search for; its first group is the class.
    """
    if rule == "auto":
        match = _NUMBERED.fullmatch(os.path.splitext(name)[0])
    else:
        match = re.search(rule, name)
    return (match[1] or "") if match else ""


def check_name_rule(rule: str) -> None:
    """Raise a ValueError for a rule that is neither ``auto`` nor a pattern with a group."""
    if rule == "auto":
        return
    try:
        groups = re.compile(rule).groups
    except re.error as error:
        raise ValueError(f"labels_from_name is not a regular expression: {error}") from None
    if not groups:
        raise ValueError(f"labels_from_name has no group for the class, got {format_value(rule)}")


def scan_names(root: Path, rule: str) -> Scan:
    """Find the images below a folder; their names contain the classes, as in `label_of_name`.

    If all images lie in folders called train, val or test, these are the splits.
    """
    check_name_rule(rule)
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; expected a folder of images")
    paths, skipped = images_below(root)
    labels = [label_of_name(path.rpartition("/")[2], rule) for path in paths]
    unlabeled = [path for path, label in zip(paths, labels, strict=True) if not label]
    if unlabeled or not paths:
        raise ValueError(
            f"labels_from_name {rule!r} finds no class in {len(unlabeled)} of {len(paths)} images "
            f"of {root}: {join_first(unlabeled) or 'nothing'}. Pass another regular expression."
        )
    folders = [path.split("/", 1)[0].lower() if "/" in path else "" for path in paths]
    has_splits = all(folder in _SPLITS for folder in folders)
    rows = zip(folders, labels, strict=True)
    return Scan(
        tuple(paths),
        tuple(labels),
        tuple(_SPLITS[folder] if has_splits else "all" for folder in folders),
        layout(((f"{folder}/" if has_splits else "", label) for folder, label in rows), skipped),
        (),
    )


def _split_folders(root: Path, folders: Sequence[str]) -> dict[str, str]:
    """Return the split of each folder that is one."""

    def holds_images(*start: str) -> bool:
        return any(any(map(is_image, files)) for _, files in _walk(root, start, []))

    splits = {
        name: _SPLITS[name.lower()]
        for name in folders
        if name.lower() in _SPLITS
        and any(holds_images(name, below) for below in _entries(root, (name,), [], outer=True)[0])
    }
    for name in folders if len(splits) == 1 else ():
        if name.lower() not in _SPLITS and holds_images(name):
            (split,) = splits
            raise ValueError(
                f"{root}: cannot tell whether {split}/ is a split or a class, because {name}/ also "
                f"holds images. Move {name}/ elsewhere if {split}/ is a split; otherwise rename "
                f"{split}/."
            )
    return splits


def layout(rows: Iterable[tuple[str, str]], skipped: Iterable[str] = ()) -> str:
    """Describe the classes by split, given (split, class), and what was skipped."""
    classes: dict[str, set[str]] = {}
    for split_folder, label in rows:
        classes.setdefault(split_folder, set()).add(label)
    order = ["", *_SPLITS]
    parts = []
    for split_folder in sorted(classes, key=lambda name: order.index(name.lower().strip("/"))):
        names = sorted(classes[split_folder])
        where = f" in {split_folder}" if split_folder else f": {join_first(names)}"
        parts.append(f"{len(names)} class{'es' if len(names) != 1 else ''}{where}")
    listed = join_first(sorted(skipped))
    return f"images: {', '.join(parts) or 'none'}" + (f"; skipped: {listed}" if listed else "")


def _walk(root: Path, start: Names, skipped: list[str]) -> Iterator[tuple[Names, list[str]]]:
    """Yield the folders below ``start``, itself included, and the visible files of each."""
    pending = [start]
    while pending:
        parts = pending.pop()
        folders, files = _entries(root, parts, skipped)
        yield parts, files
        pending += [(*parts, name) for name in reversed(folders)]


def _entries(
    root: Path, parts: Names, skipped: list[str], *, outer: bool = False
) -> tuple[list[str], list[str]]:
    """Return the visible folders and files of a folder of the root, sorted.

    In an outer folder, which holds splits or classes, links out of the root are followed.
    """
    real = os.path.realpath(root)
    try:
        with os.scandir(root.joinpath(*parts)) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        raise OSError(
            f"{error.filename} cannot be read: {error.strerror}. Make it readable, or move it away."
        ) from error
    folders, files = list[str](), list[str]()
    for entry in entries:
        name, inner_path = entry.name, "/".join((*parts, entry.name))
        target = os.path.realpath(entry.path) if entry.is_symlink() else ""
        if os.path.isdir(entry.path) if target else entry.is_dir(follow_symlinks=False):
            if name.startswith(".") or name in _SYSTEM_FOLDERS:
                skipped.append(inner_path)
            elif target and not outer:
                skipped.append(f"{inner_path} (a link to a folder)")
            elif target and os.path.commonpath([real, target]) in (real, target):
                skipped.append(f"{inner_path} (a link to {target})")
            else:
                folders.append(name)
        elif not name.startswith("."):
            inside = target.startswith(real + os.sep) and os.path.exists(entry.path)
            if inside and not outer:
                skipped.append(f"{inner_path} (a link to {target})")
            else:
                files.append(name)
    return folders, files


def split_shard_path(path: str) -> tuple[str, str]:
    """Split "shard.tar::member" into file and member; the member of a plain path is empty.

    Images in ``.bin`` verification sets and in ``.rec`` files are numbered: "train.rec::1".
    """
    match = _CONTAINER.fullmatch(path) if SEPARATOR in path else None
    return (match[1], match[2]) if match else (path, "")


def shard_members(shard: str | os.PathLike[str]) -> Mapping[str, tuple[int, int]]:
    """Return {member: (offset, size)} of the files in a tar, .bin or .rec file.

    The tar must be uncompressed; the size in a .rec file is that of the record.
    """
    if os.fspath(shard).endswith(".rec"):
        from proximetry.data.recordio import index_file, read_index

        name = os.fspath(shard)
        return read_index(name, file_state(name), file_state(index_file(name)))
    return _members(os.fspath(shard), file_state(shard))


def read_member(shard: str, member: str) -> bytes:
    """Return the content of a member."""
    members = shard_members(shard)
    if member not in members:
        raise ValueError(f"{shard} has no member {member!r}")
    start, size = members[member]
    with open_file(shard) as file:
        if shard.endswith(".rec"):
            from proximetry.data.recordio import read_image

            return read_image(file, start)
        file.seek(start)
        return file.read(size)


def file_state(file: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return size, mtime, ctime and inode, which identify the state of a file.

    Unlike mtime, programs cannot set ctime.
    """
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


@lru_cache(maxsize=1024)
def _members(shard: str, state: tuple[int, ...]) -> Mapping[str, tuple[int, int]]:
    # The state is part of the key, so a replaced shard is read again.
    if shard.endswith(".bin"):
        return {str(number): span for number, span in enumerate(read_image_pairs(shard).images)}
    with open_file(shard) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                members = {m.name: (m.offset_data, m.size) for m in tar if m.isreg()}
        except tarfile.TarError as error:
            raise ValueError(f"{shard} is not an uncompressed tar file: {error}") from error
        file.seek(max(0, state[0] - 1024))
        if file.read() != bytes(1024):  # the two empty blocks that every complete tar ends with
            raise ValueError(
                f"{shard} is truncated after {len(members)} members: no end-of-archive marker"
            )
    return members


def open_file(name: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading; a pipe or a device might never end."""
    kind = stat.S_IFMT(os.stat(name).st_mode)
    if kind != stat.S_IFREG:
        raise OSError(errno.EINVAL, f"{_KINDS.get(kind, 'a special file')}, not a file", name)
    return open(name, "rb")


def scan_shards(files: Sequence[Path]) -> tuple[Path, Scan]:
    """Return the folder around the shards, and the images in them; see Catalog.from_shards."""
    if not files:
        raise ValueError("no shards. Pass tar files that hold <class>/<image>.")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file} is not a file; expected a tar that holds <class>/<image>")
        if file.suffix != ".tar":
            raise ValueError(f"{file} is not a .tar file. Decompress it first.")
    root = Path(os.path.commonpath([f.resolve().parent for f in files]))
    rows: list[tuple[str, str, str]] = []
    for file in files:
        relative = file.resolve().relative_to(root).as_posix()
        for member in shard_members(file):
            inner_path = PurePosixPath(member)
            if is_image(inner_path.name) and inner_path.parent.name:
                folder = inner_path.parent.parent.name
                rows.append((f"{relative}{SEPARATOR}{member}", inner_path.parent.name, folder))
    if not rows:
        names = join_first(map(str, files))
        raise ValueError(f"no <class>/<image> in the shards: {names}")
    splits = {_SPLITS.get(folder.lower()) for _, _, folder in rows}
    has_splits = None not in splits or len(splits) > 2
    skipped = [path for path, _, folder in rows if has_splits and folder.lower() not in _SPLITS]
    rows = [row for row in rows if not has_splits or row[2].lower() in _SPLITS]
    return root, Scan(
        tuple(path for path, _, _ in rows),
        tuple(label for _, label, _ in rows),
        tuple(_SPLITS[folder.lower()] if has_splits else "all" for _, _, folder in rows),
        layout(((f"{folder}/" if has_splits else "", label) for _, label, folder in rows), skipped),
        (),
    )
