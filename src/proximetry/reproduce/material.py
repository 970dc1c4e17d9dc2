"""The data of a table, found and checked once before the first run starts."""

from collections.abc import Callable
from pathlib import Path

from proximetry.data import Catalog, PixelCache, list_datasets, open_dataset
from proximetry.reproduce.tables import Table
from proximetry.reproduce.trouble import ReproduceError
from proximetry.training.recipe import Recipe

# Classes for training and for test: a folder with others is not that dataset.
_CLASSES = {"cub": (100, 100), "cars": (98, 98), "sop": (11318, 11316), "inshop": (3997, 3985)}


def find_data(table: Table, data: str | Path | None) -> tuple[Path | None, Catalog]:
    """The folder of the table's dataset, and its catalogue; a wrong folder says what to pass."""
    name = table.dataset
    if name == "glyphs":
        return None, open_dataset(name)
    if data is None:
        raise ReproduceError(f"--data is missing. {_what_to_pass(name)}")
    given = Path(data).expanduser()
    inner = given / name
    root = (inner if inner.is_dir() else given).absolute()
    try:
        catalog = open_dataset(name, root)
        _check_classes(name, root, catalog)
    except (ValueError, OSError) as error:
        raise ReproduceError(f"{error}. {_what_to_pass(name)}") from error
    return root, catalog


def _what_to_pass(name: str) -> str:
    about = list_datasets()[name]
    return f"Pass as --data the folder of {about}, or a folder that holds it as {name}/"


def _check_classes(name: str, root: Path, catalog: Catalog) -> None:
    parts = [catalog.filter(split=split) for split in ("train", "test")]
    found = tuple(len(part.class_names) for part in parts)
    if 0 in found:
        missing = "train" if found[0] == 0 else "test"
        raise ReproduceError(f"{root} has no images of split {missing!r}")
    if found != _CLASSES.get(name, found):
        raise ReproduceError(
            f"{root} holds {found[0]} classes for training and {found[1]} for test, "
            f"{name} has {_CLASSES[name][0]} and {_CLASSES[name][1]}"
        )


def count_images(catalog: Catalog) -> dict[str, int]:
    """Images for training and for test."""
    return {split: len(catalog.filter(split=split)) for split in ("train", "test")}


def decode(catalog: Catalog, recipes: list[Recipe], report: Callable[[str], None]) -> None:
    """Fill the pixel caches that the runs will use, so that they do not wait for each other."""
    wanted = {(r.data.short_side, r.data.cache_dir, r.data.bad_images) for r in recipes}
    for side, place, policy in sorted(wanted, key=str):
        if side is not None:  # else the size is the model's own, which the run finds out
            report(f"pixels of {len(catalog)} images, short side {side}")
            PixelCache.build(catalog, side, place, policy=policy)
