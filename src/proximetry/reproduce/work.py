"""One run, from its recipe to its JSON file; what goes wrong becomes a sentence."""

import gc
import shutil
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

import torch

from proximetry.reproduce.plan import Job
from proximetry.reproduce.records import Record, make_record
from proximetry.training.checkpoint import write_atomically
from proximetry.training.display import Display
from proximetry.training.folder import RunFolder
from proximetry.training.run import train
from proximetry.training.stopping import Stopped


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Args:
        run: its name.
        summary: for the line that reports it; empty if it did not end well.
        error: one sentence, if it failed.
        stopped: whether it was asked to stop, and saved itself.
    """

    run: str
    summary: str = ""
    error: str = ""
    stopped: bool = False


def perform(job: Job, display: Display | None = None) -> Outcome:
    """Do a run, or the rest of one, and write its file."""
    name = job.run.id
    try:
        record = _train(job, display)
    except (Stopped, KeyboardInterrupt):
        return Outcome(name, stopped=True)
    except Exception as error:  # one run must not take the others with it
        return Outcome(name, error=_sentence(job, error))
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return Outcome(name, summary=_summary(record))


def _train(job: Job, display: Display | None) -> Record:
    train(job.recipe, job.work, device=job.device, display=display)
    record = make_record(job, RunFolder(job.work), _card(job.device))
    record.write(job.out)
    if not job.keep:
        shutil.rmtree(job.work, ignore_errors=True)
    return record


def _summary(record: Record) -> str:
    if record.chosen_epoch is not None:
        text = f"epoch {record.chosen_epoch} chosen on held-out classes"
    else:
        test = record.test() or {}
        text = f"recall@1 {100 * test['recall@1']:.1f}" if "recall@1" in test else "done"
    return text if record.seconds is None else f"{text}, {record.seconds:.0f} s"


def on_cuda(device: str | None) -> bool:
    """Whether a run on this device uses a card."""
    if device is None:
        return torch.cuda.is_available()
    return device.startswith("cuda")


def _card(device: str | None) -> str:
    if not on_cuda(device):
        return "CPU"
    return torch.cuda.get_device_name(torch.device(device or "cuda"))


def _sentence(job: Job, error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
        return (
            f"{_memory(job.device)} has too little memory for it and what else runs there; lower "
            "--parallel, or give a table file of your own with a smaller data.batch_size, a larger "
            "training.accumulate or data.cache: disk"
        )
    if isinstance(error, (ValueError, OSError, ImportError)):
        return " ".join(str(error).split())
    trace = job.out / "work" / f"{job.run.id}.error.txt"
    write_atomically(trace, "".join(traceback.format_exception(error)).encode())
    return f"{type(error).__name__}: {' '.join(str(error).split())} (the whole of it is in {trace})"


def _memory(device: str | None) -> str:
    if not on_cuda(device) or not torch.cuda.is_available():
        return "this machine"
    card = torch.cuda.get_device_properties(torch.device(device or "cuda"))
    return f"the card ({card.name}, {card.total_memory / 2**30:.0f} GiB)"


@contextmanager
def terminate_like_interrupt() -> Iterator[None]:
    """Let SIGTERM act as Ctrl-C does where a run does not catch it itself."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
