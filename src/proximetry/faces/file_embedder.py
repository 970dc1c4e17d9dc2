"""`FileEmbedder`: vectors of image files, in one process or several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from proximetry._util.tensors import chunks, l2_normalize
from proximetry._util.types import Progress
from proximetry.faces import BadImages, Flip
from proximetry.faces.face_embedder import FaceEmbedder
from proximetry.metrics import Identification, VerificationRates
from proximetry.metrics._search.similarities import normalize
from proximetry.metrics.distributed import gather_objects, raise_on_all_ranks
from proximetry.models.encoding import embed_images


def describe_rates(result: VerificationRates | Identification, missing: str) -> str:
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

    ``flip`` "concat" appends the vector of the mirror image; "sum" adds it, before normalization.
    ``unnormalized`` vectors are those before L2 normalization. ``lengths``, if a dictionary, gets
    the length of the unnormalized vector of each image, the mean over its views. ``unreadable``
    collects images that could not be read, with the reason, if they are skipped.
    """

    embedder: FaceEmbedder
    flip: Flip
    batch_size: int
    bad_images: BadImages
    group: dist.ProcessGroup | None
    unnormalized: bool = False
    lengths: dict[str, float] | None = None
    unreadable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def width(self) -> int:
        """The dimension of the combined vectors."""
        return self.embedder.dim * (2 if self.flip == "concat" else 1)

    @property
    def views(self) -> str:
        """The views of an image that its vector combines, in words."""
        return self.embedder.describe_views(self.flip)

    def sum_by_owner(
        self,
        files: Sequence[str],
        owners: Sequence[int],
        progress: Progress | None,
        weights: npt.ArrayLike | None = None,
    ) -> Tensor:
        """Return the sum of the unit vectors of each owner's images, [owners, …], float64.

        With ``weights``, vectors are multiplied by those of their images instead of normalized.
        Each process embeds its share and returns the total. Unreadable images add nothing.
        """
        sums = torch.zeros(1 + max(owners), self.width, dtype=torch.float64)
        owner = torch.tensor(owners)
        factors = None if weights is None else torch.as_tensor(weights, dtype=torch.float64)

        def add() -> None:
            for rows, batch in self.batches(files, progress):
                vectors = batch.double()
                scaled = normalize(vectors) if factors is None else vectors * factors[rows, None]
                sums.index_add_(0, owner[rows], scaled)

        raise_on_all_ranks(add, self.group)
        if self.group is not None:
            # The sum of a single image is exact: all other processes add zeros.
            total = sums.to(self.embedder.device)
            dist.all_reduce(total, group=self.group)
            sums = total.cpu()
        self.share_unreadable()
        return sums

    def share_unreadable(self) -> None:
        """Collect the unreadable images and the lengths of all processes."""
        if self.group is not None:
            for images, lengths in gather_objects((self.unreadable, self.lengths), self.group):
                self.unreadable.update(images)
                if self.lengths is not None and lengths is not None:
                    self.lengths.update(lengths)

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
            self._embed,
            (files[row] for row in share),
            self.embedder.preprocessing,
            device=self.embedder.device,
            batch_size=self.batch_size,
            concat_flip=self.flip != "none",
            on_error=skip,
            explain_nonfinite=lambda: "its weights may be damaged, or its input settings wrong",
        ):
            rows = [share[index] for index in indices]
            views = vectors.chunk(1 if self.flip == "none" else 2, 1)
            if self.lengths is not None:
                lengths = torch.stack([view[:, -1] for view in views]).mean(0).tolist()
                self.lengths.update(zip((files[row] for row in rows), lengths, strict=True))
                views = tuple(view[:, :-1] for view in views)
            yield rows, views[0] + views[1] if self.flip == "sum" else torch.cat(views, 1)
            done += len(indices)
            if progress is not None:
                progress(done, len(share))

    def _embed(self, pixels: Tensor) -> Tensor:
        """Return the vectors of one view, followed by their unnormalized length if requested."""
        embedder, unnormalized = self.embedder, self.unnormalized or self.flip == "sum"
        if self.lengths is None:
            return ((unnormalized and embedder.features) or embedder.embed)(pixels)
        features = (embedder.features or embedder.embed)(pixels)
        unit, lengths = l2_normalize(features)
        vectors = unit if embedder.features is not None and not unnormalized else features
        return torch.cat([vectors, lengths[:, None]], 1)
