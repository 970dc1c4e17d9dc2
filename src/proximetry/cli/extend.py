"""`proximetry extend`: add classes to a trained run."""

import os
import sys
from pathlib import Path

from proximetry.cli.options import AsJson, Device, Flag
from proximetry.cli.output import print_result


def extend(
    run: Path,
    new_images: str,
    /,
    *,
    out: Path | None = None,
    epochs: int | None = None,
    keep_space: Flag = False,
    no_replay: Flag = False,
    root: Path | None = None,
    device: Device = None,
    fresh: Flag = False,
    as_json: AsJson = False,
) -> None:
    """Add classes to a trained run, in another run folder.

    The new run starts from the embedder and the proxies of the old one and trains on the images of
    both. Repeat an interrupted command to resume it.

    Args:
        run: folder of a finished run.
        new_images: a folder of class folders, a table, a tar file, vectors or a dataset's name, as
            for `proximetry train`; images of known classes are added to these classes.
        out: folder of the new run; default: that of the old run with a number, as in runs/mine-2.
        epochs: number of epochs; default: a third of those of the old run, but at least three and,
            if that run had as many, enough for 100 steps.
        keep_space: keep the embedder unchanged, so that galleries remain valid; only add classes
            and proxies.
        no_replay: do not use the old images; the old embedder is the teacher of the new one.
        root: path of the old images, if they have moved.
        fresh: remove the run in the folder, even if it is complete, and start over.
    """
    from proximetry.training.extension import default_out, describe_extension
    from proximetry.training.extension import extend as start
    from proximetry.training.reporting import make_display

    out = default_out(run) if out is None else out
    results = start(
        run,
        new_images,
        out,
        root=root,
        epochs=epochs,
        keep_space=keep_space,
        replay=not no_replay,
        device=device,
        resume=not fresh,
        display=make_display(sys.stderr if as_json else None),
    )
    if os.environ.get("RANK", "0") == "0":  # only rank 0 prints
        text = f"{describe_extension(results)}\n\nrun: {out}"
        print_result(as_json, {"folder": str(out), **results}, text)
