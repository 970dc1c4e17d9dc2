"""Vectors of face images, on one process or several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.errors import Progress
from proximetry._util.tensors import chunks
from proximetry.faces.embedder import FaceEmbedder
from proximetry.faces.options import BadImages
from proximetry.metrics._search.inputs import normalize
from proximetry.metrics.distributed import gather_objects, together
from proximetry.models.encoding import embed_images


@dataclass
class FaceVectors:
    """How images are embedded: by what, how many at once, and who of several processes is asked.

    ``unreadable`` collects the images that could not be read, if these are skipped.
    """

    embedder: FaceEmbedder
    batch_size: int = 64
    flip: bool = True
    bad_images: BadImages = "error"
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        self.unreadable: dict[str, str] = {}

    @property
    def width(self) -> int:
        """Dimension of the vectors."""
        return self.embedder.dim * (2 if self._concat_flip else 1)

    @property
    def _concat_flip(self) -> bool:
        return self.flip and not self.embedder.flip_tta

    def pooled(
        self, files: Sequence[str], owners: Sequence[int], progress: Progress | None = None
    ) -> Tensor:
        """Return the sum of the unit vectors of each owner's images, [owners, width], float64.

        Every process embeds its share and gets the whole. Unreadable images add nothing.
        """
        sums = torch.zeros(1 + max(owners), self.width, dtype=torch.float64)
        whose = torch.tensor(owners)

        def add() -> None:
            for rows, vectors in self.batches(files, progress):
                sums.index_add_(0, whose[rows], normalize(vectors.double()))

        together(add, self.group)
        if self.group is not None:
            # A single image is embedded by one process and adds to nothing but zeros.
            total = sums.to(self.embedder.device)
            dist.all_reduce(total, group=self.group)
            sums = total.cpu()
        self.share_unreadable()
        return sums

    def share_unreadable(self) -> None:
        """Let every process know what one could not read."""
        if self.group is not None:
            for found in gather_objects(self.unreadable, self.group):
                self.unreadable.update(found)

    def batches(
        self, files: Sequence[str], progress: Progress | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield which images and their vectors, batch by batch, of this process's share.

        Whole batches go to a process, so that vectors do not depend on how many there are.
        """
        parts = list(chunks(len(files), self.batch_size))
        if self.group is not None:
            parts = parts[dist.get_rank(self.group) :: dist.get_world_size(self.group)]
        mine = [row for part in parts for row in range(part.start, part.stop)]

        def left_out(place: int, error: Exception) -> None:
            file = files[mine[place]]
            reason = str(error).removeprefix(f"{file}: ")
            if self.bad_images == "error":
                raise ValueError(f"{file}: {reason}; --bad-images skip leaves such images out")
            self.unreadable[file] = reason

        embedder = self.embedder
        done = 0
        for places, vectors in embed_images(
            embedder.embed,
            (files[row] for row in mine),
            embedder.preprocessing,
            device=embedder.device,
            batch_size=self.batch_size,
            concat_flip=self._concat_flip,
            on_error=left_out,
            blame=embedder.blame,
        ):
            yield [mine[place] for place in places], vectors
            done += len(places)
            if progress is not None:
                progress(done, len(mine))
