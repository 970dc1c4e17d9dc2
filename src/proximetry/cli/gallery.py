"""The commands of `proximetry gallery`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from proximetry._util.errors import UsageError
from proximetry._util.formatting import format_int, parse_seconds, pluralize
from proximetry.cli.inputs import open_gallery
from proximetry.cli.options import MAX_K, AsJson, SearchEffort
from proximetry.cli.output import print_result, progress_bar
from proximetry.search.manifest import GALLERY

ABOUT = "List, restore, merge and compact galleries, and measure their recall."


def versions(gallery: Path = Path(GALLERY), /, *, as_json: AsJson = False) -> None:
    """List the versions of a gallery: the current one, and those replaced within a day.

    Args:
        gallery: folder of the gallery.
    """
    listed = open_gallery(str(gallery), None).versions()
    document = [
        {"version": one.number, "created": one.created.isoformat(), "images": one.images}
        for one in listed
    ]
    lines = [
        f"{one.number:>8}  {one.created.astimezone():%Y-%m-%d %H:%M:%S}  "
        f"{pluralize(one.images, 'image')}"
        for one in listed
    ]
    text = "\n".join(lines) + "  (current)"
    print_result(as_json, {"gallery": str(gallery), "versions": document}, text)


def rollback(
    gallery: Path = Path(GALLERY), version: int | None = None, /, *, as_json: AsJson = False
) -> None:
    """Return a gallery to an earlier version, as a new version.

    Args:
        gallery: folder of the gallery; may be omitted before a version.
        version: its number (`proximetry gallery versions`); default: the one before the current.
    """
    if version is None and str(gallery).isdecimal() and not gallery.exists():
        gallery, version = Path(GALLERY), int(str(gallery))
    opened = open_gallery(str(gallery), None)
    opened.rollback(version)
    text = f"{gallery}: {pluralize(len(opened), 'image')}"
    print_result(as_json, {"gallery": str(gallery), "images": len(opened)}, text)


def merge(*galleries: Path, out: Path, index: str | None = None, as_json: AsJson = False) -> None:
    """Merge galleries of one embedder into a new one.

    Args:
        galleries: folders of the galleries.
        out: folder of the new gallery.
        index: as in `proximetry index`; default: that of the galleries if it is the same.
    """
    from proximetry.search import Gallery

    notes = list[str]()
    opened = [open_gallery(str(gallery), None) for gallery in galleries]
    with progress_bar("merging") as progress:
        merged = Gallery.merge(opened, out, index, progress=progress, report=notes.append)
    text = "\n".join([*notes, f"{out}: {pluralize(len(merged), 'image')}"])
    print_result(as_json, {"gallery": str(out), "images": len(merged), "notes": notes}, text)


def compact(
    gallery: Path = Path(GALLERY), /, *, keep: str | None = None, as_json: AsJson = False
) -> None:
    """Rewrite a gallery without removed images, and index all images.

    Args:
        gallery: folder of the gallery.
        keep: then remove versions that were replaced longer ago, such as 90s, 2h or 7d, to free
            disk space; default: a day.
    """
    try:
        seconds = None if keep is None else parse_seconds(keep)
    except ValueError as error:
        raise UsageError(f"--keep {error}") from None
    opened, notes = open_gallery(str(gallery), None), list[str]()
    with progress_bar("compacting") as progress:
        opened.compact(progress=progress, report=notes.append)
    if seconds is not None:
        opened.prune(seconds)
    document = {"gallery": str(gallery), "images": len(opened), "notes": notes}
    print_result(as_json, document, "\n".join(notes))


def recall(
    gallery: Path = Path(GALLERY),
    /,
    *,
    sample: Annotated[int, Parameter(validator=Number(gte=1))] = 1000,
    k: Annotated[int, Parameter(name=["-k", "--k"], validator=Number(gte=1, lte=MAX_K))] = 10,
    nprobe: SearchEffort = None,
    ef: SearchEffort = None,
    refine: SearchEffort = None,
    as_json: AsJson = False,
) -> None:
    """Measure the recall of a gallery's index against exact searches.

    Args:
        gallery: folder of the gallery.
        sample: number of images to search with.
        k: number of results per query.
        nprobe: as in `proximetry search`.
        ef: as in `proximetry search`.
        refine: as in `proximetry search`.
    """
    opened = open_gallery(str(gallery), None)
    value = opened.recall(sample, k, nprobe=nprobe, ef=ef, refine=refine)
    count = format_int(min(sample, len(opened)))
    text = f"recall@{k} {value:.4f}, measured on {count} images of {opened!r}"
    document = {"gallery": str(gallery), "k": k, "recall": value, "sample": sample}
    print_result(as_json, document, text)


COMMANDS: dict[str, Callable[..., Any]] = {
    "versions": versions,
    "rollback": rollback,
    "merge": merge,
    "compact": compact,
    "recall": recall,
}
