"""Stanford Online Products and In-Shop Clothes Retrieval."""

from __future__ import annotations

from pathlib import Path

from proximetry import data
from proximetry.data.registry import (
    Home,
    Size,
    dataset,
    drop_missing,
    fields_of,
    wrong_folder,
)

_SOP, _INSHOP = "Stanford Online Products", "In-Shop Clothes Retrieval"
_SOP_LISTS = {"train": "Ebay_train.txt", "test": "Ebay_test.txt"}
_SOP_HOME = Home(tuple(_SOP_LISTS.values()), ("Stanford_Online_Products",))
_INSHOP_HOME = Home(("Eval/list_eval_partition.txt",), ("In-shop", "inshop"))


@dataset(
    "sop",
    title=_SOP,
    layout="Stanford_Online_Products/Ebay_train.txt and Ebay_test.txt with <kind>_final/",
    train=Size(59551, 11318),
    test=Size(60502, 11316),
    homes=(_SOP_HOME,),
)
def sop(root: Path) -> data.Catalog:
    """Read Stanford Online Products by its lists; the kind of product is the group."""
    home = _SOP_HOME.find(root)
    if home is None:
        raise wrong_folder(_SOP, root, "Ebay_train.txt and Ebay_test.txt")
    rows = [
        (path, label, split, path.split("/")[0].removesuffix("_final"))
        for split, name in _SOP_LISTS.items()
        for _, label, _, path in fields_of(home / name, 4, skip=1)
    ]
    if not rows:
        raise ValueError(f"{_SOP}: the lists in {home} are empty")
    paths, labels, splits, groups = zip(*rows, strict=True)
    return drop_missing(_SOP, data.Catalog(paths, labels, splits, home, groups=groups))


@dataset(
    "inshop",
    title=_INSHOP,
    layout="Eval/list_eval_partition.txt with Img/img/",
    train=Size(25882, 3997),
    test=Size(26830, 3985),
    query=Size(14218, 3985),
    gallery=Size(12612, 3985),
    homes=(_INSHOP_HOME,),
)
def inshop(root: Path) -> data.Catalog:
    """Read In-Shop Clothes Retrieval by its partition; the kind of garment is the group."""
    base = _INSHOP_HOME.find(root) or root
    places = (base / "Eval" / "list_eval_partition.txt", base / "list_eval_partition.txt")
    partition = next((file for file in places if file.is_file()), None)
    if partition is None:
        raise wrong_folder(_INSHOP, base, "Eval/list_eval_partition.txt")
    # The paths in the list begin with img/.
    home = next((home for home in (base / "Img", base) if (home / "img").is_dir()), None)
    if home is None:
        raise wrong_folder(_INSHOP, base, "Img/img/ (unpack Img/img.zip)")
    # The first line is a count, the second the names of the columns.
    rows = list(fields_of(partition, 3, skip=2))
    for path, _, role in rows:
        if role not in ("train", "query", "gallery"):
            raise ValueError(f"{partition}: {role!r} of {path} is none of train, query, gallery")
    catalog = data.Catalog(
        paths=tuple(path for path, _, _ in rows),
        labels=tuple(label for _, label, _ in rows),
        splits=tuple("train" if role == "train" else "test" for _, _, role in rows),
        root=home,
        queries=tuple(role == "query" for _, _, role in rows),
        galleries=tuple(role == "gallery" for _, _, role in rows),
        groups=tuple("/".join(path.split("/")[1:3]) for path, _, _ in rows),
    )
    return drop_missing(_INSHOP, catalog)
