"""Time a whole run of `proximetry train IMAGES`, first with empty caches, then with warm ones.

    python -m benchmarks.whole_run                       (on a GPU)
    python -m benchmarks.whole_run --profile -- --model.weights none
    python -m benchmarks.whole_run --images 240 --classes 12 -- --device cpu --training.epochs 3 \
        --model.backbone tf_efficientnet_lite0 --model.weights none

It writes an image folder, runs the command twice in separate processes and prints the seconds of
each phase. Caches of pixels and compiled kernels are in a new folder. Options after -- are passed
to the command. With --profile, a third run lists the slowest functions.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
CACHES = ("PROXIMETRY_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
# Runs the command and writes start and duration of the functions that make up the phases.
TRAIN = """
import atexit, cProfile, functools, json, pstats, sys, time
import proximetry.training as training
from proximetry.cli import app

spans_file, profile_file, *sys.argv[1:] = sys.argv[1:]
spans, profile = [], cProfile.Profile()

def record(owner, name):
    function = getattr(owner, name)
    def timed(*args, **options):
        start = time.time()
        try:
            return function(*args, **options)
        finally:
            spans.append((name, start, time.time() - start))
    setattr(owner, name, timed)

def load(name):
    value = lazy(name)
    if name == "train" and not hasattr(training, "recorded"):
        training.recorded = True
        from proximetry.training import trainer
        from proximetry.training.evaluator import Evaluator
        from proximetry.training.sources.image_data import ImageData
        for function in ("build", "evaluate_untrained", "train_epoch", "save_state",
                         "save_embedder", "evaluate_final"):
            record(trainer, function)
        record(Evaluator, "evaluate")
        record(ImageData, "open_cache")
    return value

lazy, training.__getattr__ = training.__getattr__, load
if profile_file:
    app.main = functools.partial(profile.runcall, app.main)
record(app, "main")

@atexit.register
def write():
    with open(spans_file, "w") as file:
        json.dump(spans, file)
    if profile_file:
        with open(profile_file, "w") as file:
            pstats.Stats(profile, stream=file).sort_stats("tottime").print_stats(40)

app.entry()
"""


IMPORTS = """
from proximetry.cli.app import make_app
make_app()
import proximetry.training.dry_run, proximetry.training.trainer
import torch._dynamo
"""


class Span(NamedTuple):
    """A call of a function: seconds since 1970, and its duration."""

    name: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        """Return when the call ended."""
        return self.start + self.seconds


def make_image(root: Path, classes: int, number: int) -> None:
    """Write a JPEG file of 256 to 500 pixels: the pattern of its class plus a random one."""
    label, draw = number % classes, np.random.default_rng(number)
    pattern = np.random.default_rng(label).uniform(0, 160, (6, 6, 3))
    coarse = np.kron(pattern, np.ones((4, 4, 1))) + draw.uniform(0, 95, (24, 24, 3))
    width, height = (int(side) for side in draw.integers(256, 501, 2))
    image = Image.fromarray(coarse.astype(np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = draw.normal(0, 6, (height, width, 3))
    pixels = (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)
    folder = root / f"class{label:02d}"
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=90)


def python_environment(folder: Path) -> dict[str, str]:
    """Return variables that let Python find the source, and write bytecode beside the images."""
    bytecode = {"PYTHONPYCACHEPREFIX": str(folder / "bytecode"), "PYTHONDONTWRITEBYTECODE": ""}
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), **bytecode}


def run_command(images: Path, folder: Path, name: str, options: list[str]) -> dict[str, float]:
    """Run the command; return the seconds of its phases, in order."""
    out, spans_file = folder / name, folder / f"{name}.json"
    profile = str(folder / "profile.txt") if name == "profile" else ""
    caches = {variable: str(folder / "caches" / variable.lower()) for variable in CACHES}
    environment = {**os.environ, **python_environment(folder), **caches}
    command = [
        sys.executable,
        "-c",
        TRAIN,
        str(spans_file),
        profile,
        "train",
        str(images),
        str(out),
    ]
    started, first_line = time.time(), 0.0
    with subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            first_line = first_line or time.time()
            print(f"{time.time() - started:7.2f}  {line}", end="", flush=True)
    ended = time.time()
    if child.returncode:
        raise SystemExit(f"{name}: exit code {child.returncode}")
    spans = [Span(*span) for span in json.loads(spans_file.read_text())]
    return phases(spans, started, first_line, ended)


def phases(spans: list[Span], started: float, first_line: float, ended: float) -> dict[str, float]:
    """Return the seconds of each phase; their sum is the whole time."""
    by_name = defaultdict(list)
    for span in spans:
        by_name[span.name].append(span)
    [build], [final], [main] = by_name["build"], by_name["evaluate_final"], by_name["main"]
    cache = sum(span.seconds for span in by_name["open_cache"])
    untrained = sum(span.seconds for span in by_name["evaluate_untrained"])
    seconds = {
        "until the first line": first_line - started,
        "imports": build.start - first_line,
        "build": build.seconds - cache,
        "pixel cache": cache,
        "untrained evaluation": untrained,
    }
    starts = [span.start for span in by_name["train_epoch"]]
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], final.start], strict=True), 1):
        epochs = f"epoch {number}" if number <= 2 else f"epochs 3 to {len(starts)}"
        for title, names in (
            ("training", ("train_epoch",)),
            ("evaluation", ("evaluate",)),
            ("writing", ("save_state", "save_embedder")),
        ):
            inside = [span for name in names for span in by_name[name] if start <= span.start < end]
            part = f"{epochs}, {title}"
            seconds[part] = seconds.get(part, 0.0) + sum(span.seconds for span in inside)
    seconds["final evaluation"] = final.seconds
    seconds["final embedder"] = by_name["save_embedder"][-1].seconds
    seconds["exit"] = ended - main.end
    return {**seconds, "other": ended - started - sum(seconds.values()), "wall": ended - started}


def stopwatch(run: Path) -> str:
    """Return the durations that the run recorded."""
    results: dict[str, Any] = json.loads((run / "results.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line["evaluation_seconds"] for line in lines if "evaluation_seconds" in line]
    return (
        f"start-up {results['startup_seconds']:.1f}, training {results['seconds']:.1f}, "
        f"{len(evaluations)} evaluations {sum(evaluations):.1f}"
    )


def main() -> None:
    """Print a table of phases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=2800)
    parser.add_argument("--classes", type=int, default=18)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("options", nargs="*", help="options of proximetry train, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = folder / "images"
        with ProcessPoolExecutor() as pool:
            make = partial(make_image, images, arguments.classes)
            list(pool.map(make, range(arguments.images), chunksize=50))
        # Compile bytecode, as an installer does.
        environment = {**os.environ, **python_environment(folder)}
        subprocess.run([sys.executable, "-c", IMPORTS], env=environment, check=True)
        names = ("cold", "warm", *(["profile"] if arguments.profile else []))
        runs = {}
        for run in names:
            print(f"\n{run}: seconds since the start, and the output")
            runs[run] = run_command(images, folder, run, arguments.options)
        print(f"\n{'seconds':28}{''.join(f'{run:>9}' for run in names)}")
        for phase in runs["cold"]:
            print(f"{phase:28}{''.join(f'{seconds[phase]:9.2f}' for seconds in runs.values())}")
        for run in names:
            print(f"{run}, recorded by the run: {stopwatch(folder / run)}")
        if arguments.profile:
            print((folder / "profile.txt").read_text())


if __name__ == "__main__":
    main()
