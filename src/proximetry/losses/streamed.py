"""The streamed engine: the numbers of the dense one, tile by tile over the classes.

Memory is O(batch · tile) beyond the proxies and their gradient, never batch × classes × K.

- Class-wise losses are separable by class, so one pass finishes a tile: value and both gradients.
  Backward only scales what forward left behind.
- Sample-wise losses keep a running log-sum-exp in forward and visit the tiles again in backward.
  If one tile holds all the classes, it is kept instead of computed twice.

The similarities of the samples to their own class come from gathered proxies, outside the tiles,
so that a loss can put any margin on them with plain autograd.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximetry.losses.similarity import (
    cosines,
    inverse_length,
    reduce_proxies,
    spread_gradient,
)
from proximetry.losses.sums import add_rows_
from proximetry.losses.table import Row, log1p_sum_exp

#: Entries of a batch × tile × K block. On the CPU a block should stay in the cache, on a GPU it
#: should fill the card.
TILE_ENTRIES = {"cpu": 2**18, "cuda": 2**26}

#: Below this |logit| the exponential neither overflows nor vanishes in float32 (e^60 ≈ 1e26), so
#: no maximum need be subtracted.
SAFE_EXPONENT = 60.0


def streamed(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    row: Row,
    gamma: float,
    scale: float | Tensor,
    offset: float,
    class_weight: float | Tensor,
    tile: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Do what `dense.dense` does, over tiles of ``tile`` classes."""
    if tile is None:
        entries = TILE_ENTRIES.get(x.device.type, TILE_ENTRIES["cpu"])
        tile = max(1, entries // (x.shape[0] * weight.shape[1]))
    function = _ByClass if row.group == "class" else _BySample
    wanted = torch.is_grad_enabled()
    setting = _Setting(row, gamma, offset, class_weight, min(tile, weight.shape[0]), wanted)
    positive, negatives = function.apply(x, weight, labels, scale, setting)  # type: ignore[no-untyped-call]
    return positive, negatives


@dataclass(frozen=True)
class _Setting:
    row: Row
    gamma: float
    offset: float
    class_weight: float | Tensor
    tile: int
    wanted: bool  # whether autograd records


class _Tile(NamedTuple):
    start: int
    stop: int
    rows: Tensor  # the samples whose own class lies in the tile
    columns: Tensor  # and where it lies


class _Gradients(NamedTuple):
    x: Tensor | None
    weight: Tensor | None
    scale: Tensor | None


class _Problem:
    """The tensors of one call, with the steps that both kinds of grouping share."""

    def __init__(
        self, x: Tensor, weight: Tensor, labels: Tensor, scale: float | Tensor, setting: _Setting
    ) -> None:
        self.x, self.weight, self.labels, self.setting = x, weight.contiguous(), labels, setting
        self.scale = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
        bound = abs(setting.offset) + (abs(scale) if isinstance(scale, float) else torch.inf)
        self.bounded = bound < SAFE_EXPONENT

    def tiles(self) -> Iterator[_Tile]:
        """Cut the classes into tiles; sorting the labels once saves a search per tile."""
        step, classes = self.setting.tile, self.weight.shape[0]
        order = self.labels.argsort()
        starts = torch.arange(0, classes + step, step, device=self.labels.device)
        cuts = torch.searchsorted(self.labels[order], starts).tolist()
        for number, start in enumerate(range(0, classes, step)):
            rows = order[cuts[number] : cuts[number + 1]]
            yield _Tile(start, min(start + step, classes), rows, self.labels[rows] - start)

    def cosines(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Return the cosines [K, B, T] of a tile and the inverse lengths [T, K] of its proxies."""
        w = self.weight[tile.start : tile.stop]
        inverse, _ = inverse_length(w)
        return cosines(self.x, w, inverse), inverse

    def logits(self, tile: _Tile, S: Tensor) -> Tensor:
        """Return the negative logits [B, T] of a tile, -inf where the class is the sample's own."""
        if isinstance(self.scale, float):
            z = torch.add(self.x.new_tensor(self.setting.offset), S, alpha=self.scale)
        else:
            z = (S * self.scale).add_(self.setting.offset)
        z[tile.rows, tile.columns] = -torch.inf
        return z

    def similarity(self, s: Tensor) -> Tensor:
        return reduce_proxies(s, self.setting.row.similarity, self.setting.gamma)

    def spread(self, grad: Tensor, s: Tensor, S: Tensor) -> Tensor:
        return spread_gradient(grad, s, S, self.setting.row.similarity, self.setting.gamma)

    def empty_gradients(self, needs: tuple[bool, ...]) -> _Gradients:
        return _Gradients(
            torch.zeros_like(self.x) if needs[0] else None,
            torch.empty_like(self.weight) if needs[1] else None,
            self.x.new_zeros(self.x.shape[0]) if needs[3] else None,
        )

    def add_tile(
        self, into: _Gradients, tile: _Tile, g: Tensor, s: Tensor, S: Tensor, inverse: Tensor
    ) -> None:
        """Turn ``g`` = ∂L/∂logit of a tile into gradients of x, proxies and scale. Uses g, s up."""
        if into.scale is not None:
            into.scale.add_((g * S).sum(1))
        g = self.spread(g.mul_(self.scale), s, S)
        # d cos / dw = (x − cos · ŵ) / ‖w‖: the second part is one number per proxy.
        radial = s.mul_(g).sum(1).T.mul(inverse.square()).neg_().reshape(-1, 1)
        classes, k = inverse.shape
        w = self.weight[tile.start : tile.stop].view(classes * k, -1)
        g = g.permute(1, 2, 0).reshape(-1, classes * k).mul_(inverse.view(-1))  # [B, T·K]
        if into.x is not None:
            into.x.addmm_(g, w)
        if into.weight is not None:
            out = into.weight[tile.start : tile.stop].view(classes * k, -1)
            torch.mul(w, radial, out=out)
            out.addmm_(g.T, self.x)

    def positive(self) -> Tensor:
        """Return each sample's similarity to its own class [B]."""
        return self.similarity(self._own()[2])

    def add_positive(self, into: _Gradients, grad: Tensor) -> None:
        """Add what reaches x and the proxies through the similarities to the own class."""
        w, inverse, s = self._own()
        g = self.spread(grad, s, self.similarity(s)) * inverse  # [K, B]
        if into.x is not None:
            into.x.add_(torch.einsum("kb,bkd->bd", g, w))
        if into.weight is not None:
            pull = g.T.unsqueeze(2) * self.x.unsqueeze(1)
            pull -= (g * s * inverse).T.unsqueeze(2) * w
            add_rows_(into.weight, self.labels, pull)

    def _own(self) -> tuple[Tensor, Tensor, Tensor]:
        w = self.weight[self.labels]  # [B, K, D]
        inverse = inverse_length(w)[0].T  # [K, B]
        return w, inverse, torch.einsum("bd,bkd->kb", self.x, w) * inverse


class _ByClass(torch.autograd.Function):
    """Negative term of a class-wise loss: one pass gives the value and the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float | Tensor,
        setting: _Setting,
    ) -> tuple[Tensor, Tensor]:
        problem = _Problem(x, weight, labels, scale, setting)
        needs = ctx.needs_input_grad
        value, ctx.ready = _class_pass(problem, needs if setting.wanted else (False,) * 4)
        _remember(ctx, x, weight, labels, scale, setting)
        return problem.positive(), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_positive: Tensor, grad_value: Tensor) -> Any:
        with torch.autocast(grad_value.device.type, enabled=False):
            problem = _recall(ctx)
            # The gradients of forward are handed over, not copied; a second backward through the
            # same graph makes them anew.
            ready, ctx.ready = ctx.ready, None
            if ready is None:
                _, ready = _class_pass(problem, ctx.needs_input_grad)
            for gradient in ready:
                if gradient is not None and not _is_one(grad_value):
                    gradient.mul_(grad_value)
            problem.add_positive(ready, grad_positive)
            return ready.x, ready.weight, None, ready.scale, None


def _class_pass(problem: _Problem, needs: tuple[bool, ...]) -> tuple[Tensor, _Gradients]:
    value = problem.x.new_zeros(())
    gradients = problem.empty_gradients(needs)
    for tile in problem.tiles():
        s, inverse = problem.cosines(tile)
        S = problem.similarity(s)
        z = problem.logits(tile, S)
        if problem.bounded:
            e, shift = z.exp_(), value.new_zeros(())
        else:
            shift = z.amax(0).clamp_(min=0.0)
            e = z.sub_(shift).exp_()
        total = e.sum(0)
        share = problem.setting.class_weight
        if isinstance(share, Tensor):
            share = share[tile.start : tile.stop]
        value += (log1p_sum_exp(total, shift) * share).sum()
        if any(needs):
            g = e.mul_(share / (total + torch.exp(-shift)))
            problem.add_tile(gradients, tile, g, s, S, inverse)
    return value, gradients


class _BySample(torch.autograd.Function):
    """Log-sum-exp over the other classes, per sample: a running sum, then a second pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float | Tensor,
        setting: _Setting,
    ) -> tuple[Tensor, Tensor]:
        problem = _Problem(x, weight, labels, scale, setting)
        single = setting.tile >= weight.shape[0]
        floor = torch.finfo(x.dtype).min  # stands for -inf, but can be subtracted from -inf
        shift = x.new_full((x.shape[0], 1), 0.0 if problem.bounded else floor)
        total = x.new_zeros(x.shape[0], 1)
        ctx.kept = None
        for tile in problem.tiles():
            s, inverse = problem.cosines(tile)
            S = problem.similarity(s)
            z = problem.logits(tile, S)
            if single and setting.wanted:
                ctx.kept = (tile, z.clone() if problem.bounded else z, s, S, inverse)
            if problem.bounded:
                total += z.exp_().sum(1, keepdim=True)
            else:
                peak = torch.maximum(shift, z.amax(1, keepdim=True))
                total = total * torch.exp(shift - peak) + (z - peak).exp_().sum(1, keepdim=True)
                shift = peak
        lse = (shift + total.log()).squeeze(1)
        _remember(ctx, x, weight, labels, scale, setting, lse)
        return problem.positive(), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_positive: Tensor, grad_lse: Tensor) -> Any:
        with torch.autocast(grad_lse.device.type, enabled=False):
            problem = _recall(ctx)
            lse = ctx.saved_tensors[-1].unsqueeze(1)
            lse = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
            gradients = problem.empty_gradients(ctx.needs_input_grad)
            kept, ctx.kept = ctx.kept, None
            for tile in problem.tiles():
                if kept is not None:
                    _, z, s, S, inverse = kept
                else:
                    s, inverse = problem.cosines(tile)
                    S = problem.similarity(s)
                    z = problem.logits(tile, S)
                g = z.sub_(lse).exp_().mul_(grad_lse.unsqueeze(1))
                problem.add_tile(gradients, tile, g, s, S, inverse)
            problem.add_positive(gradients, grad_positive)
            return gradients.x, gradients.weight, None, gradients.scale, None


def _remember(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    scale: float | Tensor,
    setting: _Setting,
    *more: Tensor,
) -> None:
    kept_scale = scale if isinstance(scale, Tensor) else None
    ctx.save_for_backward(x, weight, labels, kept_scale, *more)
    ctx.scale = scale if isinstance(scale, float) else None
    ctx.setting = setting


def _recall(ctx: Any) -> _Problem:
    x, weight, labels, scale, *_ = ctx.saved_tensors
    return _Problem(x, weight, labels, scale if ctx.scale is None else ctx.scale, ctx.setting)


def _is_one(grad: Tensor) -> bool:
    """Whether scaling can be skipped; a GPU is not asked, since the answer would have to wait."""
    return grad.device.type == "cpu" and grad.item() == 1.0
