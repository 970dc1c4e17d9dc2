"""The command line: one function per command; cyclopts derives the options from its signature."""

from proximetry.cli.app import entry, main, make_app

__all__ = ["entry", "main", "make_app"]
