"""Things to try."""
