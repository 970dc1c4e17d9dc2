"""What commands print: text for people, one JSON document for scripts."""

import json
import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from cyclopts import Parameter

AsJson = Annotated[
    bool,
    Parameter(name="--json", negative=(), help="print one JSON document, for scripts."),
]


def tell(as_json: bool, document: Any, text: str) -> None:
    """Print the document or the text."""
    print(json.dumps(document, indent=2) if as_json else text)


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
