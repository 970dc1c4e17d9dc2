"""`watch`: update a gallery whenever files of a folder change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from proximetry._util.errors import UsageError
from proximetry._util.formatting import join_first, pluralize
from proximetry.search import metadata
from proximetry.search.gallery import Gallery
from proximetry.search.indexing import Model, index_table, update
from proximetry.search.manifest import Report, ignore
from proximetry.search.new_images import Stamp, stamp_of


def watch(
    list_images: Callable[[], Any],
    out: str | os.PathLike[str],
    model: Model,
    index: str | None,
    device: str | None,
    folders: Sequence[str | os.PathLike[str]] | None,
    *,
    interval: float,
    report: Report,
    **options: Any,
) -> NoReturn:
    """List the images repeatedly, and update a gallery, until KeyboardInterrupt.

    A file is indexed when two listings find it unchanged, so that it is not read while it is
    written. Folders are synchronized while no file is being written; otherwise files are added
    only. Other arguments are as in `index_table`.
    """
    gallery: Gallery | None = None
    previous, unreadable = dict[str, Stamp](), dict[str, Stamp]()
    done: Any = None
    message = ""
    options |= {"bad_images": "skip", "report": ignore}
    while True:
        table: Any = None
        try:
            table = list_images()
            stamps = [(path, stamp_of(path)) for path in metadata.values(table["path"])]
            current = {path: stamp for path, stamp in stamps if stamp}
            unchanged = {path: s for path, s in current.items() if previous.get(path) == s}
            ready = {path: s for path, s in unchanged.items() if unreadable.get(path) != s}
            complete, previous = len(unchanged) == len(stamps), current
            if ready and (ready, complete) != done:
                table = table.filter(metadata.arrow().array([path in ready for path, _ in stamps]))
                scope = folders if complete else None
                if gallery is None:
                    gallery, changes = index_table(
                        table, out, model, index, device, scope, **options
                    )
                else:
                    gallery.refresh()
                    changes = update(gallery, table, scope, **options)
                unreadable |= {path: ready[path] for path, _ in gallery.skipped}
                done = ready, complete
                if any(changes):
                    report(f"{gallery.name}: {pluralize(len(gallery), 'image')}: {changes}")
                if gallery.skipped:
                    report(f"skipped {join_first(map(str, gallery.skipped))}")
            message = ""
        except ValueError as error:  # such as a folder without images, or a locked gallery
            if gallery is None and table is not None and isinstance(error, UsageError):
                raise  # such as an unknown index
            if str(error) != message:
                message = str(error)
                report(message)
        time.sleep(interval)
