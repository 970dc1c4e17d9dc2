"""Proxy Synthesis (Gu et al. 2021): synthetic classes between the classes of a batch."""

import torch
from torch import Tensor

from proximetry._util.tensors import l2_normalize

#: α of the Beta distribution, as in the authors' scripts.
ALPHA = 0.4


def synthesize(
    embeddings: Tensor, labels: Tensor, weights: Tensor | None, proxies: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Append synthetic samples to a batch, and a proxy for each to the proxies [C, 1, D].

    Random pairs of samples of different classes give ``λ x̂_i + (1 − λ) x̂_j``, with label C + n, and
    ``λ ŵ_{y_i} + (1 − λ) ŵ_{y_j}``; λ ~ Beta(α, α) is the same for the batch. Their number is at
    most ``share`` of the samples. Lengths and weights are interpolated, too.
    """
    is_used = labels >= 0 if weights is None else (labels >= 0) & (weights > 0)
    used = is_used.nonzero().squeeze(1)
    first = used[torch.randperm(len(used)).to(used.device)]
    pairs = torch.stack([first, first.roll(1)])
    pairs = pairs[:, labels[pairs[0]] != labels[pairs[1]]][:, : round(share * len(used))]
    # Drawn on the CPU, for the same numbers on any device.
    factor = torch.distributions.Beta(ALPHA, ALPHA).sample().item()

    def interpolate(values: Tensor) -> Tensor:
        return factor * values[0] + (1 - factor) * values[1]

    unit, length = l2_normalize(embeddings.to(proxies.dtype)[pairs])
    synthetic = l2_normalize(interpolate(unit))[0] * interpolate(length).unsqueeze(1)
    classes = torch.arange(len(proxies), len(proxies) + pairs.shape[1], device=labels.device)
    if weights is not None:
        weights = torch.cat([weights, interpolate(weights[pairs])])
    new_proxies = interpolate(l2_normalize(proxies[labels[pairs]])[0])
    return (
        torch.cat([embeddings.to(proxies.dtype), synthetic]),
        torch.cat([labels, classes]),
        weights,
        torch.cat([proxies, new_proxies]),
    )
