"""Where the batches of a run come from: image files, vectors, torch datasets."""
