"""Proxy-based losses."""
