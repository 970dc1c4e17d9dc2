"""Render HTML pages from the templates of this package; every value is escaped."""

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from proximetry._util.formatting import format_int, shorten
from proximetry.metrics import Interval
from proximetry.reports.thumbnails import data_uri
from proximetry.training.metrics_table import metric_title

_TEMPLATES = Environment(
    loader=PackageLoader("proximetry.reports"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_MAX_NAME_LENGTH = 60
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # invalid in HTML


def percent(value: float | None) -> str:
    """Format a fraction in percent, or None as a dash."""
    return "–" if value is None else f"{100 * value:.1f}"


def short(name: object) -> str:
    """Shorten the name of a class or a file."""
    return shorten(str(name), _MAX_NAME_LENGTH)


def signed(value: float) -> str:
    """Format a difference of fractions in percent."""
    return f"{100 * value:+.1f}".replace("-", "−")


def interval(bounds: Interval | None) -> str:
    """Format the bounds of an interval in percent, or None as a dash."""
    return "–" if bounds is None else f"{percent(bounds.low)} to {percent(bounds.high)}"


_FILTERS = (data_uri, interval, metric_title, percent, short, signed, format_int)
_TEMPLATES.filters.update({function.__name__: function for function in _FILTERS})


def render(template: str, **values: Any) -> Markup:
    """Fill in a template."""
    return Markup(_TEMPLATES.get_template(template).render(values))


class ReportSection(NamedTuple):
    """A section of a page with its heading; the navigation links to it."""

    title: str
    content: Markup


def section(title: str, template: str, **values: Any) -> ReportSection:
    """Return a section whose content is a rendered template."""
    return ReportSection(title, render(template, **values))


def page(title: str, sections: Sequence[ReportSection], **header: Any) -> bytes:
    """Return a self-contained page; its content security policy allows only its own script."""
    style, script = (
        Markup(files("proximetry.reports").joinpath(name).read_text(encoding="utf-8"))
        for name in ("report.css", "report.js")
    )
    content = render(
        "page.html",
        title=title,
        sections=sections,
        style=style,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **{"missing": [], "notes": [], "cards": [], **header},
    )
    # File names need not be UTF-8.
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", content).encode("utf-8", "replace")
