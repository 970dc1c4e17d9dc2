"""Count the functions of the package that `proximetry train` enters before its first step.

    python -m benchmarks.entered_functions [--list]

It trains a small network on a few synthetic images on the CPU, without evaluating the untrained
network, and stops before the first optimizer step. The result is the number of functions and files
that a reader has to follow from the command line to the loss.

Counted are functions that the main thread enters (`sys.setprofile`), without imports. Nested
functions are part of the functions that define them.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
from pathlib import Path
from types import FrameType

import proximetry
from benchmarks.same_results import make_data

PACKAGE = str(Path(proximetry.__file__).parent)


class FirstStepError(BaseException):
    """Raised instead of the first step."""


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a module of the package is being imported, as when a registry is filled."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False


def main() -> None:
    """Print the number of functions and of files; with --list, each of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print every function")
    options = parser.parse_args()
    entered: set[tuple[str, str, int]] = set()

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # not the body of a module or a class
        if event != "call" or not is_function or not code.co_filename.startswith(PACKAGE):
            return
        function = code.co_filename[len(PACKAGE) + 1 :], code.co_qualname, code.co_firstlineno
        if function not in entered and not is_importing(frame):
            entered.add(function)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder)
        words = f"train {folder}/images {folder}/run --device cpu --model.backbone small_convnet"
        words += " --model.weights none --model.image-size 24 --model.pooling avg --model.dim 8"
        words += (
            f" --data.batch-size 8 --data.cache-dir {folder}/cache --evaluation.untrained false"
        )
        sys.setprofile(profile)
        try:
            from torch.optim.optimizer import register_optimizer_step_pre_hook

            from proximetry.cli import main as command_line

            def stop(*_: object) -> None:
                raise FirstStepError

            register_optimizer_step_pre_hook(stop)
            command_line(words.split())
        except FirstStepError:
            pass
        else:
            raise SystemExit("training did not reach its first step")
        finally:
            sys.setprofile(None)
    # Nested functions and comprehensions are part of the functions they are in.
    functions = {function for function in entered if "<locals>" not in function[1]}
    if options.list:
        for file, name, line in sorted(functions):
            print(f"{file}:{line} {name}")
    files = {file for file, _, _ in functions}
    print(f"{len(functions)} functions in {len(files)} files")


if __name__ == "__main__":
    main()
