"""Proximetry: deep metric learning with proxies."""

__version__ = "0.1.0"
