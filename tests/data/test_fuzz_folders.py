"""Random trees of files, links, pipes and odd names, compared with a slow reference reader."""

import os
import random
from pathlib import Path

import pytest

from proximetry.data import Catalog, ImageError
from proximetry.data.folders import EXTENSIONS, images_below
from proximetry.data.images import image_size

SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
STRAY = ["__MACOSX", "lost+found", "@eaDir"]
FOLDERS = ["ant", "bee", "c d", "-x", "ü", "e\udcff", "n\nl", "1.png", "docs", ".git", *STRAY]
FILES = [
    "1.png",
    "2.JPG",
    "ü.webp",
    "\udcfe.gif",
    "a\nb.png",
    "read.txt",
    "png",
    ".3.png",
    "4.png ",
]


def odd_name(rng, names):
    return rng.choice(names) if rng.random() < 0.8 else f"{rng.randrange(50)}{rng.choice(names)}"


def grow(rng, folder, depth, closed):
    """Fill a folder with a few entries of any kind; `closed` gets folders without permission."""
    names = [*FOLDERS, *(["train", "Train", "test", "valid"] * 3 if depth == 0 else ["train"])]
    for _ in range(rng.randrange(1, 7 if depth == 0 else 5)):
        kind = rng.random()
        if kind < 0.5 and depth < 4:
            place = folder / odd_name(rng, names)
            if not os.path.lexists(place):
                place.mkdir()
                grow(rng, place, depth + 1, closed)
                if rng.random() < 0.02:
                    closed.append(place)
            continue
        place = folder / odd_name(rng, FILES)
        if os.path.lexists(place):
            continue
        if kind < 0.9:
            place.touch()
        elif kind < 0.95:
            os.mkfifo(place)
        else:
            place.symlink_to(rng.choice([place.name, f"{place.name} gone"]))


def visible(folder):
    """Return the names of folders and files, without hidden and unrelated ones."""
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    folders = [name for name in names if os.path.isdir(os.path.join(folder, name))]
    return [n for n in folders if n not in STRAY], [n for n in names if n not in folders]


def is_image(name):
    return os.path.splitext(name)[1].lower() in EXTENSIONS


def reached(root, starts):
    """Return the real folders of the root's folders and links."""
    around = {os.path.realpath(root), *map(str, Path(os.path.realpath(root)).parents)}
    found, ahead = set(), [os.path.join(root, name) for name in starts]
    while ahead:
        real = os.path.realpath(ahead.pop())
        if real not in found | around:
            found.add(real)
            ahead += [os.path.join(real, name) for name in visible(real)[0]]
    return found


def images_in(folders):
    """Return the real files of the images in these folders."""
    return {
        os.path.realpath(os.path.join(folder, name))
        for folder in folders
        for name in visible(folder)[1]
        if is_image(name)
    }


def own_place(root, real):
    """Return the path from the root to a real file without links or hidden folders."""
    inside = os.path.relpath(real, os.path.realpath(root)).split(os.sep)
    plain = not any(name.startswith(".") or name in STRAY for name in inside)
    return tuple(inside) if plain else None


def expected(root):
    """Return class folders, whether there are splits, and the real files of all images; or None."""
    folders = visible(root)[0]
    splits = [name for name in folders if name.lower() in SPLITS]
    homes = [
        name
        for name in splits
        if images_in(reached(root, [name]) - {os.path.realpath(os.path.join(root, name))})
    ]
    if len(homes) == 1:
        home = os.path.realpath(os.path.join(root, homes[0]))
        for name in set(folders) - set(splits):
            inside = reached(root, [name])
            if os.path.realpath(os.path.join(root, name)) != home and images_in(inside):
                return None
    starts = homes or folders
    loose = {os.path.realpath(os.path.join(root, name)) for name in homes}
    # A split that links into another split is the folder of one of its classes.
    loose = {
        place
        for place in loose
        if len(own_place(root, place) or ()) < 2 or own_place(root, place)[0] not in homes
    }
    return starts, bool(homes), images_in(reached(root, starts) - loose)


def check_places(root, paths, starts, depth):
    """Check that every image is listed once, in order, under its own path."""
    real = {os.path.realpath(os.path.join(root, path)): path for path in paths}
    assert len(real) == len(paths)
    for place, path in real.items():
        own = own_place(root, place)
        if own and len(own) > depth and (own[0] in starts or depth == 0) and is_image(own[-1]):
            assert path == "/".join(own)
    keys = [(path.split("/")[:-1], path.split("/")[-1]) for path in paths]
    assert keys == sorted(keys)
    return set(real)


def check_skipped(root, catalog):
    """Check that skipped files and folders are named."""
    text = "\n".join([catalog.layout, *catalog.notes])
    skipped = text.partition("skipped: ")[2]
    used = {"/".join(parts[:i]) for p in catalog.paths for parts in [p.split("/")] for i in (1, 2)}
    for home, folders, files in os.walk(root):
        inside = "" if home == str(root) else os.path.relpath(home, root) + "/"
        for name in list(folders):
            folder = f"{inside}{name}"
            if name.startswith(".") or name in STRAY:
                assert folder in skipped
                folders.remove(name)
            elif folder in skipped:
                folders.remove(name)
            elif inside == "" or os.path.islink(root / folder):
                assert folder in used or folder in text or inside.count("/") > 1
        for name in files:
            listed = f"{inside}{name}" in catalog.paths or f"{inside}{name}" in text
            assert listed or name.startswith(".")


def outcome(root):
    try:
        return Catalog.from_folder(root)
    except (OSError, ValueError) as error:
        return error


def check_tree(root):
    """Compare the catalog of a folder with the reference reader."""
    found, account = outcome(root), expected(root)
    if account is None:
        assert "is a split or a class" in str(found)
        return "ambiguous"
    starts, divided, images = account
    if not images:
        assert "holds no images in sub-folders" in str(found)
        return "empty"
    assert check_places(root, found.paths, starts, 2 if divided else 1) == images
    for i, (path, label, split) in enumerate(
        zip(found.paths, found.labels, found.splits, strict=True)
    ):
        parts = path.split("/")
        assert label == parts[divided]
        assert split == (SPLITS[parts[0].lower()] if divided else "all")
        with pytest.raises(ImageError):  # all are empty; a pipe would block
            image_size(found.file(i))
    check_skipped(root, found)
    return "splits" if divided else "classes"


def check_closed(root):
    """The error names a folder without permission, unless it is irrelevant."""
    found = outcome(root)
    if isinstance(found, OSError):
        assert "cannot be read: Permission denied" in str(found)
        return "closed"
    if isinstance(found, Catalog):
        assert not [path for path in found.paths if not os.access((root / path).parent, os.R_OK)]
    return "open"


@pytest.mark.parametrize("seed", range(4))
def test_random_folders_equal_a_reference_reader(ordinary_user, monkeypatch, seed):
    monkeypatch.setattr("proximetry.data.folders.join_first", ", ".join)  # not only the first
    rng = random.Random(seed)
    seen = set()
    for number in range(80):
        root, pool, closed = ordinary_user / f"{number}/root", ordinary_user / f"{number}/pool", []
        for folder in (root, pool):
            folder.mkdir(parents=True)
        grow(rng, pool, 2, [])
        grow(rng, root, 0, closed)
        for folder in closed:
            folder.chmod(0)
        if closed:
            seen.add(check_closed(root))
            continue
        seen.add(check_tree(root))
        below, _ = images_below(root)
        everything = reached(root, visible(root)[0]) | {os.path.realpath(root)}
        assert check_places(root, below, (), 0) == images_in(everything)
    assert {"splits", "classes", "ambiguous", "empty", "closed"} <= seen
