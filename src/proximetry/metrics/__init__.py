"""Retrieval, clustering and verification metrics."""
