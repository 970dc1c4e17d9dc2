"""`FileEmbedder`: vectors of image files, in one process or several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.tensors import chunks
from proximetry._util.types import Progress
from proximetry.faces import BadImages
from proximetry.faces.face_embedder import FaceEmbedder
from proximetry.metrics import Identification, Verification
from proximetry.metrics._search.similarities import normalize
from proximetry.metrics.distributed import gather_objects, raise_on_all_ranks
from proximetry.models.encoding import embed_images


def describe_rates(result: Verification | Identification, missing: str) -> str:
    """Return TAR at every FAR as text, with ``missing`` for FARs that cannot be measured."""
    rates = [f"{far:g}: {100 * tar:.2f} %" for far, tar in result.tar_at_far.items()]
    return ", ".join([*rates, *(f"{far:g}: {missing}" for far in result.unmeasurable_far)])


def with_notes(lines: list[str], skipped: Sequence[str], what: str, notes: Sequence[str]) -> str:
    """Join the lines of a result, the skipped items and the notes."""
    if skipped:
        lines = [*lines, f"{len(skipped)} {what} skipped:", *(f"  {reason}" for reason in skipped)]
    return "\n".join([*lines, *(f"note: {note}" for note in notes)])


@dataclass
class FileEmbedder:
    """Embed images in batches, shared among the processes of a group.

    ``concat_flip`` appends the vector of the mirror image. ``unreadable`` collects images that
    could not be read, with the reason, if they are skipped.
    """

    embedder: FaceEmbedder
    concat_flip: bool
    batch_size: int
    bad_images: BadImages
    group: dist.ProcessGroup | None
    unreadable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    def sum_by_owner(
        self, files: Sequence[str], owners: Sequence[int], progress: Progress | None
    ) -> Tensor:
        """Return the sum of the unit vectors of each owner's images, [owners, …], float64.

        Each process embeds its share and returns the total. Unreadable images add nothing.
        """
        width = self.embedder.dim * (2 if self.concat_flip else 1)
        sums = torch.zeros(1 + max(owners), width, dtype=torch.float64)
        owner = torch.tensor(owners)

        def add() -> None:
            for rows, vectors in self.batches(files, progress):
                sums.index_add_(0, owner[rows], normalize(vectors.double()))

        raise_on_all_ranks(add, self.group)
        if self.group is not None:
            # The sum of a single image is exact: all other processes add zeros.
            total = sums.to(self.embedder.device)
            dist.all_reduce(total, group=self.group)
            sums = total.cpu()
        self.share_unreadable()
        return sums

    def share_unreadable(self) -> None:
        """Collect the unreadable images of all processes."""
        if self.group is not None:
            for images in gather_objects(self.unreadable, self.group):
                self.unreadable.update(images)

    def batches(
        self, files: Sequence[str], progress: Progress | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the indices and vectors of this process's share, batch by batch.

        Processes get whole batches, so that vectors do not depend on their number.
        """
        parts = list(chunks(len(files), self.batch_size))
        if self.group is not None:
            parts = parts[dist.get_rank(self.group) :: dist.get_world_size(self.group)]
        share = [row for part in parts for row in range(part.start, part.stop)]

        def skip(index: int, error: Exception) -> None:
            file = files[share[index]]
            reason = str(error).removeprefix(f"{file}: ")
            if self.bad_images == "error":
                raise ValueError(f"{file}: {reason}. Skip such images with --bad-images skip.")
            self.unreadable[file] = reason

        done = 0
        for indices, vectors in embed_images(
            self.embedder.embed,
            (files[row] for row in share),
            self.embedder.preprocessing,
            device=self.embedder.device,
            batch_size=self.batch_size,
            concat_flip=self.concat_flip,
            on_error=skip,
            explain_nonfinite=lambda: "its weights may be damaged, or its input settings wrong",
        ):
            yield [share[index] for index in indices], vectors
            done += len(indices)
            if progress is not None:
                progress(done, len(share))
