"""Relational distillation: embeddings learn the similarities of a teacher."""

import torch
from torch import Tensor
from torch.nn import functional as F

from proximetry._util.tensors import l2_normalize
from proximetry.losses.regularizers import Term
from proximetry.losses.settings import positive


class RelationalLoss(Term):
    """Keeps the neighborhoods of a teacher.

    ``weight · mean_i KL(softmax_j(t_ij / temperature) ‖ softmax_j(s_ij / temperature))`` over the
    other samples j of a batch, with the cosines s of the embeddings and t of the teacher. The
    teacher can be a moving average, another embedder of any dimension, or any matrix of
    similarities, as of texts.

    Examples:
        >>> x = torch.randn(4, 8)
        >>> RelationalLoss()(x, x).item()
        0.0
    """

    def __init__(self, weight: float = 1.0, temperature: float = 0.1) -> None:
        super().__init__(weight)
        self.temperature = positive("temperature", temperature)

    def forward(
        self,
        embeddings: Tensor,
        teacher: Tensor | None = None,
        *,
        similarities: Tensor | None = None,
    ) -> Tensor:
        """Return the term of a batch [B, D]; zero for one sample.

        Args:
            embeddings: [B, D], of any length.
            teacher: the teacher's embeddings [B, E].
            similarities: instead, the teacher's similarities [B, B].
        """
        if (teacher is None) == (similarities is None):
            raise ValueError("pass either the embeddings or the similarities of the teacher")
        size = len(embeddings)
        if teacher is not None and len(teacher) != size:
            raise ValueError(f"got {len(teacher)} embeddings of the teacher for a batch of {size}")
        if similarities is not None and similarities.shape != (size, size):
            raise ValueError(
                f"similarities must be [{size}, {size}], got {list(similarities.shape)}"
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            student = _cosines(embeddings)
            if size < 2:
                return student.sum() * 0.0
            if similarities is None:
                assert teacher is not None
                similarities = _cosines(teacher)
            return self.weight * F.kl_div(
                self._log_shares(student),
                self._log_shares(similarities.detach().to(student)),
                reduction="batchmean",
                log_target=True,
            )

    def _log_shares(self, similarities: Tensor) -> Tensor:
        """Return the log-softmax of the entries beside the diagonal, [B, B − 1]."""
        size = len(similarities)
        others = similarities.flatten()[1:].view(size - 1, size + 1)[:, :-1].reshape(size, -1)
        return torch.log_softmax(others / self.temperature, 1)


def _cosines(x: Tensor) -> Tensor:
    unit, _ = l2_normalize(x.to(torch.promote_types(x.dtype, torch.float32)))
    return unit @ unit.T
