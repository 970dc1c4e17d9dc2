"""`python -m proximetry` is the command line."""

from proximetry.cli import entry

entry()
