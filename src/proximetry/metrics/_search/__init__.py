"""Exact nearest-neighbor search, shared by metrics and galleries."""
