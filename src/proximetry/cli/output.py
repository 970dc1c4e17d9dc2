"""What commands print: text for people, one JSON document for scripts."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter, Token
from cyclopts.validators import Number

from proximetry._util.errors import Progress, UsageError, printable
from proximetry._util.files import check_writable
from proximetry.models.names import LARGEST_BATCH

AsJson = Annotated[
    bool,
    Parameter(name="--json", negative=(), help="print one JSON document, for scripts."),
]

BatchSize = Annotated[int, Parameter(validator=Number(gte=1, lte=LARGEST_BATCH))]

# The recipe's own names too, so that what was said to `train` can be said to any command.
BadImages = Annotated[
    Literal["error", "skip"],
    Parameter(
        name=["--bad-images", "--data.bad-images"],
        help="stop at missing or unreadable images, or leave them out and list them.",
    ),
]


def read_columns(kind: Any, tokens: Sequence[Token]) -> dict[str, str]:
    """Read path=file,label=category."""
    found: dict[str, str] = {}
    for pair in tokens[0].value.split(","):
        field, sign, column = (part.strip() for part in pair.partition("="))
        if not (field and sign and column) or field in found:
            raise ValueError(f"expected pairs such as path=file,label=category, got {pair!r}")
        found[field] = column
    return found


COLUMNS_WORD = "path=COLUMN,label=COLUMN"
TableColumns = Annotated[
    Any,
    Parameter(
        name=["--columns", "--data.columns"],
        converter=read_columns,
        accepts_keys=False,
        n_tokens=1,
        metavar=COLUMNS_WORD,
        help="what a table calls its columns where these have other names.",
    ),
]


@contextmanager
def advice_to_skip() -> Iterator[None]:
    """Add to the error about an image how to do without it."""
    try:
        yield
    except ValueError as error:
        from proximetry.data import ImageError

        found = error if isinstance(error, ImageError) else error.__cause__
        if not isinstance(found, ImageError):
            raise
        raise ValueError(f"{found}; --bad-images skip leaves such images out") from error


def check_out(out: Path, sources: Sequence[str | PathLike[str]] = ()) -> None:
    """Refuse a file that cannot be written, or that is read, before the work."""
    check_writable(out)
    if out.exists() and any(Path(source).exists() and out.samefile(source) for source in sources):
        raise UsageError(f"{out} is read by this command and would be replaced; name another file")


def check_document(out: Path | None, sources: Sequence[str | PathLike[str]]) -> None:
    """The same for the file, if any, that the JSON document is to be written to."""
    if out is None:
        return
    if out.suffix.lower() != ".json":
        raise UsageError(
            f"--out {out} must end in .json: it is for the document that --json prints"
        )
    check_out(out, sources)


def say(text: str, *, to_stderr: bool = False) -> None:
    """Print a text; names in it cannot control the terminal. Commands print by no other way."""
    print(printable(text), file=sys.stderr if to_stderr else None, flush=True)


def tell(as_json: bool, document: Any, text: str) -> None:
    """Print the document or the text."""
    say(json.dumps(document, indent=2) if as_json else text)


@contextmanager
def progress_bar(what: str, *, shown: bool = True) -> Iterator[Progress]:
    """A bar with the time that remains, on a terminal; nothing elsewhere."""
    with progress_steps(shown=shown) as steps:
        yield lambda done, total: steps(what, done, total)


@contextmanager
def progress_steps(*, shown: bool = True) -> Iterator[Callable[[str, int, int], None]]:
    """The same for several steps one after the other, each of which has a name."""
    if not shown or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done: int, total: int) -> None:
            if what not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[what] = bar.add_task(what, total=None)
            bar.update(tasks[what], completed=done, total=total)

        yield show


def wrap(text: str, first: str = "", then: str = "") -> str:
    """Fill lines up to the width of the terminal, or 80 columns; words stay whole."""
    return textwrap.fill(
        text,
        shutil.get_terminal_size().columns,
        initial_indent=first,
        subsequent_indent=then,
        break_long_words=False,
        break_on_hyphens=False,
    )


def columns(entries: Mapping[str, Sequence[str]]) -> str:
    """Set names on the left and their paragraphs, wrapped, on the right."""
    left = max(map(len, entries)) + 2
    lines = []
    for name, paragraphs in entries.items():
        told = [wrap(text, " " * left, " " * left) for text in paragraphs if text]
        lines.append((name.ljust(left) + "\n".join(told)[left:]).rstrip())
    return "\n".join(lines)
