"""Sources of training batches: image files, vectors, torch datasets."""
