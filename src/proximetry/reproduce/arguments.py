"""The words of `proximetry reproduce` that a signature cannot express."""

from typing import Any

_SWITCHES = {
    "render": "only write README.md and the pictures anew from the results that are there",
    "keep": "keep checkpoints and embedders of the runs",
    "list": "list the tables and leave",
}


def add_arguments(parser: Any) -> None:
    """Add the table, the seeds and the switches to a parser."""
    parser.add_argument("table", nargs="?", help="name of a table, or a YAML file; see --list")
    parser.add_argument(
        "--seeds", nargs="+", type=int, default=[0], help="one run per row and seed"
    )
    for name, about in _SWITCHES.items():
        parser.add_argument(f"--{name}", action="store_true", help=about)
