"""Helpers that several packages need; not public."""
