"""The command line: one plain function per command, read from its signature by cyclopts."""

from proximetry.cli.app import entry, main, make_app

__all__ = ["entry", "main", "make_app"]
