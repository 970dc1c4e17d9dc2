"""Vectors as training data, from a file or from a frozen backbone."""

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from proximetry._util.formatting import format_int, readable_size
from proximetry._util.tensors import gather_rows
from proximetry.data import VectorCatalog
from proximetry.models import Embedder, evaluation_mode
from proximetry.models.embedder import extract_features
from proximetry.recipe.auto import PIXELS_SHARE
from proximetry.recipe.schema import Recipe
from proximetry.training.distributed import World, share_buffers
from proximetry.training.reporting import Display
from proximetry.training.sources.training_data import Rows, TrainingData, fingerprint


class VectorData(TrainingData):
    """The vectors of a run in memory: on the GPU if they fit."""

    def __init__(
        self, recipe: Recipe, catalog: VectorCatalog, world: World, display: Display
    ) -> None:
        super().__init__(recipe, catalog, world, display)
        contents = hashlib.sha256(np.ascontiguousarray(catalog.vectors).data).hexdigest()
        self.fingerprint = fingerprint(catalog, contents)
        self._vectors = torch.from_numpy(catalog.vectors)
        self.origin = f"vectors from memory ({readable_size(self._vectors.nbytes)})"

    def open_cache(self, mode: str) -> None:
        """Move the vectors to the GPU of the run if they fit in a part of its memory."""
        device, size = self.world.device, self._vectors.nbytes
        if device.type == "cuda" and size <= PIXELS_SHARE * torch.cuda.mem_get_info(device)[0]:
            self._vectors = self._vectors.to(device)

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield vectors and labels of this process's part of each batch."""
        for number in range(start, len(self.sampler)):
            batch = self._batch(epoch, number)
            yield self._rows(batch.rows), self._send(torch.from_numpy(batch.labels))

    def views(self, rows: Rows, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of rows."""
        rows = self._pad_rows(rows, batch_size)
        for start in range(0, len(rows), batch_size):
            yield self._rows(rows[start : start + batch_size])

    def _rows(self, rows: Rows) -> Tensor:
        index = torch.from_numpy(rows).to(self._vectors.device)
        return self._vectors[index].to(self.world.device)


class CachedFeatures(VectorData):
    """The features of a frozen backbone for the rows of other data, computed once."""

    stage = "features"

    def __init__(self, source: TrainingData, embedder: Embedder, display: Display) -> None:
        shared = ("catalog", "rows", "protocol", "notes", "class_names", "sampler")
        for name in (*shared, "world", "fingerprint", "_recipe", "_codes"):
            setattr(self, name, getattr(source, name))
        self._vectors = _features(source, embedder, self._recipe.evaluation.batch_size, display)


def _features(data: TrainingData, embedder: Embedder, batch_size: int, display: Display) -> Tensor:
    """Return the features of all rows on the CPU; each process computes a share of every split.

    Batches and precision are those of evaluation, so that the saved embedder has bit-identical
    metrics.
    """
    world, total, done = data.world, sum(map(len, data.rows.values())), 0
    display.message(
        f"computing the features of {format_int(total)} images once (the backbone is frozen: no "
        "augmentation)"
    )
    all_features = torch.zeros(len(data.catalog), embedder.width)
    share_buffers(embedder, world)
    with torch.no_grad(), evaluation_mode(embedder):
        for rows in data.rows.values():
            share = world.local_slice(len(rows))
            parts, remaining = [torch.empty(0, embedder.width)], len(rows[share])
            for batch in data.views(rows[share], batch_size):
                features = extract_features(embedder, batch, data.stage)[:remaining].float().cpu()
                remaining -= len(features)
                done += len(features)
                parts.append(features)
                display.progress("features", min(done * world.size, total), total)
            features = torch.cat(parts)
            if world.size > 1:
                features = gather_rows(features.to(world.device))[0].cpu()
            all_features[torch.from_numpy(rows)] = features
    return all_features
