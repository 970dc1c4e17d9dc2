"""Output of commands: text or one JSON document, progress bars, output files."""

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from proximetry._util.errors import UsageError
from proximetry._util.files import atomic_write, check_writable
from proximetry._util.formatting import printable
from proximetry._util.types import Progress


@contextmanager
def skip_hint() -> Iterator[None]:
    """Add the option that skips bad images to the error of an image."""
    try:
        yield
    except ValueError as error:
        from proximetry.data import ImageError

        cause = error if isinstance(error, ImageError) else error.__cause__
        if not isinstance(cause, ImageError):
            raise
        raise ValueError(f"{cause}. Skip such images with --bad-images skip.") from error


def check_out(
    out: Path | None,
    suffixes: Sequence[str],
    sources: Sequence[str | PathLike[str]] = (),
    option: str = "--out",
) -> None:
    """Raise UsageError if an output file has another suffix, is not writable, or is an input."""
    if out is None:
        return
    if out.suffix.lower() not in suffixes:
        raise UsageError(f"{option} must end in {' or '.join(suffixes)}, got {out}")
    check_writable(out)
    if out.exists() and any(Path(source).exists() and out.samefile(source) for source in sources):
        raise UsageError(f"{option} is an input of this command: {out}. Choose another file.")


def echo(text: str, *, to_stderr: bool = False) -> None:
    """Print a text; escape characters that control a terminal."""
    print(printable(text), file=sys.stderr if to_stderr else None, flush=True)


def format_bound(threshold: float, similarity: str) -> str:
    """Return a threshold as a condition: "cosine ≥ 0.5000" or "distance ≤ 0.5000"."""
    if similarity == "euclidean":
        return f"distance ≤ {-threshold:.4f}"
    return f"{similarity} ≥ {threshold:.4f}"


def print_result(as_json: bool, document: Any, text: str, out: Path | None = None) -> None:
    """Print the document as JSON, or the text; also write the document to ``out``, if any."""
    content = json.dumps(document, indent=2, default=str)  # such as dates in columns
    if out is not None:
        atomic_write(out, content.encode())
    echo(content if as_json else text)


@contextmanager
def progress_bar(title: str, *, enabled: bool = True) -> Iterator[Progress]:
    """Show a progress bar on a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def wrap(text: str, initial_indent: str = "", subsequent_indent: str = "") -> str:
    """Wrap a text to the width of the terminal, or 80 columns, between words."""
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=initial_indent,
        subsequent_indent=subsequent_indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def columns(entries: Mapping[str, Sequence[str]]) -> str:
    """Return a table of names and, on their right, their wrapped paragraphs."""
    left = max(map(len, entries)) + 2
    lines = []
    for name, paragraphs in entries.items():
        wrapped = [wrap(text, " " * left, " " * left) for text in paragraphs if text]
        lines.append((name.ljust(left) + "\n".join(wrapped)[left:]).rstrip())
    return "\n".join(lines)


def relative_path(path: str | None) -> str:
    """Return a path relative to the working folder if it is inside."""
    from proximetry.search.search_result import REMOVED

    return REMOVED if path is None else path.removeprefix(f"{os.getcwd()}{os.sep}")
