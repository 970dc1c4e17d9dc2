"""Split an embedding into one vector per position of the feature map, exactly.

What follows the feature map is homogeneous up to a bias: f(x) = J x + c, where J is the Jacobian
at x. This is Euler's theorem for averages, maxima (the largest position has everything, ties share
it), generalized means (each position has its share of the sum of x^p) and linear layers. LayerNorm
and activations are so too, if standard deviation and gates keep their values. A position's vector
is J applied to the feature map without the other positions, plus an even share of c.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.overrides import TorchFunctionMode

from proximetry._util.errors import UsageError
from proximetry.data.images import center_crop_box, open_image
from proximetry.models.backbones import evaluation_mode
from proximetry.models.constants import CUSTOM, ONNX
from proximetry.models.embedder import Embedder, zoom_margin
from proximetry.models.explanation import Explanation
from proximetry.models.preprocessing import ImageSource

_MAX_NUMBERS = 2**24  # of the feature maps in one pass
_LINEAR = {
    *("adaptive_avg_pool2d", "avg_pool2d", "mean", "sum", "linear", "conv2d", "batch_norm", "add"),
    *("adaptive_max_pool2d", "max_pool2d", "amax", "max", "dropout", "pad", "contiguous", "to"),
    *("flatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze", "cat"),
    *("float", "type", "clone", "identity", "__getitem__"),
}
"""Functions that are homogeneous up to a bias, which the layers after a feature map may call."""
_QUERIES = {"__get__", "dim", "size", "is_contiguous", "numel", "promote_types", "_assert"}
_ACTIVATIONS = {"relu", "relu6", "leaky_relu", "silu", "gelu", "hardtanh", "hardswish", "tanh"}


class _Linearization(TorchFunctionMode):
    """Give LayerNorm and activations the derivative at fixed statistics; reject other functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__ if func.__name__.startswith("__") else func.__name__.rstrip("_")
        if name in _NORMS:
            return _NORMS[name](*args, **(kwargs or {}))
        if name in _ACTIVATIONS:
            x, value = args[0], func(args[0].detach().clone(), *args[1:], **(kwargs or {}))
            return x * torch.where(x == 0, 0, value / x).detach()
        if name not in _LINEAR | _QUERIES:
            raise UsageError(
                "explain needs average, max or GeM pooling and linear layers after the feature "
                f"map; this network calls {name}. Use another pooling or network."
            )
        return func(*args, **(kwargs or {}))


def _layer_norm(
    x: Tensor,
    shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    axes = tuple(range(-len(shape), 0))
    deviation = (x.detach().var(axes, unbiased=False, keepdim=True) + eps).sqrt()
    x = (x - x.mean(axes, keepdim=True)) / deviation
    return (x if weight is None else x * weight) + (0 if bias is None else bias)


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    squares = x.detach().square().mean(tuple(range(-len(shape), 0)), keepdim=True)
    x = x / (squares + eps).sqrt()
    return x if weight is None else x * weight


_NORMS: dict[str, Callable[..., Tensor]] = {"layer_norm": _layer_norm, "rms_norm": _rms_norm}


def explain(embedder: Embedder, a: ImageSource, b: ImageSource) -> Explanation:
    """Explain the cosine of two images; see `Embedder.explain`."""
    _check(embedder)
    sources = [image.numpy(force=True) if isinstance(image, Tensor) else image for image in (a, b)]
    pixels = [embedder.preprocessing.pixels(image) for image in sources]
    with evaluation_mode(embedder), torch.autocast(embedder.device.type, enabled=False):
        parts = [_position_vectors(embedder, image[None].to(embedder.device)) for image in pixels]
    # The same rule for zero vectors as `l2_normalize`.
    lengths = [max(float(part.sum((0, 1)).norm()), 1e-12) for part in parts]
    vectors = [(part / n).numpy() for part, n in zip(parts, lengths, strict=True)]
    images = [open_image(image) for image in sources]
    sizes = embedder.preprocessing.resize, embedder.preprocessing.crop
    boxes = [center_crop_box(image, *sizes) for image in images]
    return Explanation((vectors[0], vectors[1]), (images[0], images[1]), (boxes[0], boxes[1]))


def is_explainable(embedder: Embedder) -> bool:
    """Return whether `Embedder.explain` supports an embedder."""
    try:
        _check(embedder)
        height, width = embedder.preprocessing.crop
        blank = Image.new("RGB", (width, height))
        explain(embedder, blank, blank)
    except UsageError:
        return False
    return True


def _check(embedder: Embedder) -> None:
    architecture = embedder.architecture
    reason = ""
    if not embedder.takes_images:
        reason = f"needs an embedder of images; this one takes {embedder.preprocessing}"
    elif architecture.backbone == ONNX or architecture.backbone.startswith(CUSTOM):
        reason = "needs a network of timm, whose feature map is known, not an ONNX file or a module"
    elif architecture.similarity != "cosine":
        reason = f"splits cosines; the similarity of this embedder is {architecture.similarity}"
    elif architecture.pooling == "cls-avg":
        reason = _class_token(architecture.backbone)
    if reason:
        raise UsageError(f"explain {reason}.")


def _class_token(backbone: str) -> str:
    return (
        f"needs pooling over positions; {backbone} has a class token, which is no sum over "
        "positions. Use a network with a feature map, or one that averages its tokens"
    )


@torch.no_grad()
def _position_vectors(embedder: Embedder, pixels: Tensor) -> Tensor:
    """Return vectors [h, w, dim], float64, whose sum is the vector of an image before L2."""
    backbone: Any = embedder.backbone
    batch = embedder.preprocessing.normalize(pixels)
    views = torch.cat(embedder.views(batch.to(next(backbone.parameters()).dtype)))
    views = views.contiguous(memory_format=torch.channels_last)
    maps = backbone.forward_features(views)
    if not isinstance(maps, Tensor) or maps.ndim not in (3, 4):
        raise UsageError(f"explain needs a feature map; {embedder.architecture.backbone} has none.")
    maps = maps.contiguous()  # vmap is slow in other memory formats
    timm_pools = embedder.architecture.pooling in ("pre-logits", "token")

    def vector(maps: Tensor) -> Tensor:
        with _Linearization() if timm_pools else nullcontext():
            pooled = embedder.pool(maps)
        with _Linearization():
            return embedder.project(pooled.mean(0, keepdim=True), normalize=False)[0]

    def part(mask: Tensor) -> Tensor:
        return torch.func.jvp(vector, (maps,), (maps * mask,))[1]  # type: ignore[no-any-return]

    axis = -1 if maps.ndim == 3 or embedder.channels_last else 1
    shape = maps.select(axis, 0).shape
    masks = torch.eye(shape.numel(), device=maps.device, dtype=maps.dtype)
    masks = masks.view(-1, *shape).unsqueeze(axis if axis < 0 else 2)
    chunk = max(1, _MAX_NUMBERS // maps.numel())
    parts: Tensor = torch.func.vmap(part, chunk_size=chunk)(masks)
    parts = parts.cpu().double().view(*shape, -1)
    if maps.ndim == 3:
        parts = _grid(embedder, parts)
    folded = _fold(embedder, parts)
    rest = vector(maps).cpu().double() - folded.sum((0, 1))
    folded += rest / folded[..., 0].numel()  # an even share of the bias
    return folded


def _grid(embedder: Embedder, parts: Tensor) -> Tensor:
    """Arrange the vectors of tokens [V, T, dim] as [V, h, w, dim]."""
    backbone, name = embedder.backbone, embedder.architecture.backbone
    prefix = int(getattr(backbone, "num_prefix_tokens", 0))
    if parts[:, :prefix].any():
        raise UsageError(f"explain {_class_token(name)}.")
    parts = parts[:, prefix:]
    height, width = embedder.preprocessing.crop
    rows = max(1, round((parts.shape[1] * height / width) ** 0.5))
    if parts.shape[1] % rows or parts.shape[1] < 2:
        raise UsageError(f"explain needs tokens on a grid; {name} has {parts.shape[1]} tokens.")
    return parts.reshape(len(parts), rows, -1, parts.shape[-1])


def _fold(embedder: Embedder, parts: Tensor) -> Tensor:
    """Sum the vectors [V, h, w, dim] of views at the positions of the image [h, w, dim].

    A position of an enlarged center crop is spread over the positions below it.
    """
    _, rows, columns, _ = parts.shape
    fractions = (1.0, *embedder.architecture.tta_crops)
    result = torch.zeros_like(parts[0])
    for number, view in enumerate(parts):
        mirrored, crop = divmod(number, len(fractions))
        down, across = (
            _overlap(count, zoom_margin(side, fractions[crop]) / side).to(view)
            for count, side in zip((rows, columns), embedder.preprocessing.crop, strict=True)
        )
        view = view.flip(1) if mirrored else view
        result += torch.einsum("ik,jl,kld->ijd", down, across, view)
    return result


def _overlap(count: int, margin: float) -> Tensor:
    """Return the fraction of each cell of a crop in each cell of a side: [cells, crop's cells]."""
    edges = torch.linspace(0, 1, count + 1, dtype=torch.float64)
    inner = margin + (1 - 2 * margin) * edges
    ends = torch.minimum(edges[1:, None], inner[None, 1:])
    overlap = (ends - torch.maximum(edges[:-1, None], inner[None, :-1])).clamp(min=0)
    return overlap / overlap.sum(0)
