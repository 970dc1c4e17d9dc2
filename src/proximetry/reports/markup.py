"""HTML and SVG from values: what is not markup already is escaped, so nothing can be forgotten."""

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

_VOID = {"br", "col", "img", "input", "meta"}
# Beyond these a page would not be one any more: control characters that are no white space.
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class Markup(str):
    """Text that is markup, and goes into a page as it is."""

    __slots__ = ()


def text(value: object) -> Markup:
    """Escape a value, unless it is markup."""
    if isinstance(value, Markup):
        return value
    # The name of a file need not be UTF-8.
    plain = str(value).encode("utf-8", "replace").decode()
    return Markup(html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", plain)))


def el(tag: str, *children: object, **attributes: object) -> Markup:
    """Make an element; children are escaped unless they are markup.

    Of an attribute's name a trailing underscore is left out and others become hyphens; those that
    are None or False are left out.
    """
    given = []
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        key = name.rstrip("_").replace("_", "-")
        given.append(f" {key}" if value is True else f' {key}="{text(value)}"')
    opened = f"<{tag}{''.join(given)}>"
    if tag in _VOID:
        return Markup(opened)
    return Markup(f"{opened}{''.join(map(text, children))}</{tag}>")


def join(parts: Iterable[object], between: str = "") -> Markup:
    """Set parts one after the other."""
    return Markup(text(between).join(map(text, parts)))


def table(
    caption: object,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    *,
    numbers: bool = True,
    class_: str | None = None,
) -> Markup:
    """A table that scrolls by itself where it is too wide; the first cell names its row."""
    columns = el("tr", *(el("th", cell, scope="col") for cell in head))
    lines = [
        el("tr", el("th", first, scope="row"), *(el("td", cell) for cell in rest))
        for first, *rest in rows
    ]
    whole = el(
        "table",
        el("caption", caption),
        el("thead", columns),
        el("tbody", join(lines, "\n")),
        class_=" ".join(filter(None, ["numbers" if numbers else "", class_])) or None,
    )
    return el("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


class Section(NamedTuple):
    """A part of a page that links lead to."""

    title: str
    content: Markup

    @property
    def name(self) -> str:
        """What links lead to."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")

    def whole(self) -> Markup:
        """The part with its heading."""
        heading = el("h2", self.title, id=f"{self.name}-title")
        return el(
            "section",
            heading,
            self.content,
            id=self.name,
            aria_labelledby=f"{self.name}-title",
        )


def data_uri(content: bytes, kind: str) -> str:
    """A file as an address."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def page(title: str, head: Markup, sections: Sequence[Section]) -> bytes:
    """A whole page that needs no other file, and may load none.

    The policy of its head lets a browser run the one script that is ours, whatever else there is.
    """
    style, script = (
        files("proximetry.reports").joinpath(name).read_text(encoding="utf-8")
        for name in ("report.css", "report.js")
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    links = [el("a", one.title, href=f"#{one.name}") for one in sections]
    parts = [
        Markup("<!doctype html>"),
        Markup('<html lang="en">'),
        el(
            "head",
            el("meta", charset="utf-8"),
            el("meta", http_equiv="Content-Security-Policy", content=policy),
            el("meta", name="viewport", content="width=device-width, initial-scale=1"),
            el("meta", name="referrer", content="no-referrer"),
            el("meta", name="color-scheme", content="light dark"),
            el("title", title),
            el("style", Markup(style)),
        ),
        el(
            "body",
            el("header", head, el("nav", *links, aria_label="Parts of this report")),
            el("main", join((one.whole() for one in sections), "\n")),
            el("script", Markup(script)),
        ),
        Markup("</html>\n"),
    ]
    return "\n".join(parts).encode()


def percent(value: float | None) -> str:
    """A fraction in percent; a dash where there is none."""
    return "–" if value is None else f"{100 * value:.1f}"


def definitions(values: Mapping[str, Any]) -> Markup:
    """Names and what they are, one below the other."""
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in values.items()))
