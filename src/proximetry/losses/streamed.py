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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from proximetry._common import by_device
from proximetry.losses.formulation import Problem, log1p_sum_exp
from proximetry.losses.similarity import (
    add_rows_,
    cosines,
    inverse_length,
    reduce_proxies,
    spread_gradient,
)

#: Entries of a batch × tile × K block. On the CPU a block should stay in the cache, on a GPU it
#: should keep the whole device busy.
TILE_ENTRIES = {"cpu": 2**18, "cuda": 2**26}

#: Below this |logit| the exponential neither overflows nor vanishes in float32 (e^60 ≈ 1e26), so
#: no maximum need be subtracted.
SAFE_EXPONENT = 60.0


def streamed(problem: Problem, tile: int | None = None) -> tuple[Tensor, Tensor]:
    """Do what `dense.dense` does, over tiles of ``tile`` classes."""
    x, proxies = problem.x, problem.proxies
    if tile is None:
        entries = by_device(x.device, **TILE_ENTRIES)
        tile = max(1, entries // (x.shape[0] * proxies.shape[1]))
    function = _ByClass if problem.form.by == "class" else _BySample
    tiled = _Tiled(problem, min(tile, proxies.shape[0]))
    positive, negatives = function.apply(x, proxies, problem.scale, tiled, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return positive, negatives


class _Tile(NamedTuple):
    start: int
    stop: int
    rows: Tensor  # the samples whose own class lies in the tile
    columns: Tensor  # and where it lies


class _Gradients(NamedTuple):
    x: Tensor | None
    proxies: Tensor | None
    scale: Tensor | None


class _Tiled:
    """A problem cut into tiles, with the steps that both kinds of grouping share."""

    def __init__(self, problem: Problem, tile: int) -> None:
        self.problem, self.tile = problem, tile
        self.x, self.labels = problem.x, problem.labels
        self.proxies = problem.proxies.contiguous()
        scale = problem.scale
        self.scale = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
        bound = abs(problem.offset) + (abs(scale) if isinstance(scale, float) else torch.inf)
        self.bounded = bound < SAFE_EXPONENT

    def tiles(self) -> Iterator[_Tile]:
        """Cut the classes into tiles; sorting the labels once saves a search per tile."""
        step, classes = self.tile, self.proxies.shape[0]
        order = self.labels.argsort()
        starts = torch.arange(0, classes + step, step, device=self.labels.device)
        cuts = torch.searchsorted(self.labels[order], starts).tolist()
        for number, start in enumerate(range(0, classes, step)):
            rows = order[cuts[number] : cuts[number + 1]]
            yield _Tile(start, min(start + step, classes), rows, self.labels[rows] - start)

    def cosines(self, tile: _Tile) -> tuple[Tensor, Tensor]:
        """Return the cosines [K, B, T] of a tile and the inverse lengths [T, K] of its proxies."""
        w = self.proxies[tile.start : tile.stop]
        inverse, _ = inverse_length(w)
        return cosines(self.x, w, inverse), inverse

    def logits(self, tile: _Tile, S: Tensor) -> Tensor:
        """Return the negative logits [B, T] of a tile, -inf where the class is the sample's own."""
        if isinstance(self.scale, float):
            z = torch.add(self.x.new_tensor(self.problem.offset), S, alpha=self.scale)
        else:
            z = (S * self.scale).add_(self.problem.offset)
        z[tile.rows, tile.columns] = -torch.inf
        return z

    def similarity(self, s: Tensor) -> Tensor:
        return reduce_proxies(s, self.problem.form.similarity, self.problem.gamma)

    def spread(self, grad: Tensor, s: Tensor, S: Tensor) -> Tensor:
        return spread_gradient(grad, s, S, self.problem.form.similarity, self.problem.gamma)

    def empty_gradients(self, needs: tuple[bool, ...]) -> _Gradients:
        return _Gradients(
            torch.zeros_like(self.x) if needs[0] else None,
            torch.empty_like(self.proxies) if needs[1] else None,
            self.x.new_zeros(self.x.shape[0]) if needs[2] else None,
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
        w = self.proxies[tile.start : tile.stop].view(classes * k, -1)
        g = g.permute(1, 2, 0).reshape(-1, classes * k).mul_(inverse.view(-1))  # [B, T·K]
        if into.x is not None:
            into.x.addmm_(g, w)
        if into.proxies is not None:
            out = into.proxies[tile.start : tile.stop].view(classes * k, -1)
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
        if into.proxies is not None:
            pull = g.T.unsqueeze(2) * self.x.unsqueeze(1)
            pull -= (g * s * inverse).T.unsqueeze(2) * w
            add_rows_(into.proxies, self.labels, pull)

    def _own(self) -> tuple[Tensor, Tensor, Tensor]:
        w = self.proxies[self.labels]  # [B, K, D]
        inverse = inverse_length(w)[0].T  # [K, B]
        return w, inverse, torch.einsum("bd,bkd->kb", self.x, w) * inverse


class _ByClass(torch.autograd.Function):
    """Negative term of a class-wise loss: one pass gives the value and the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        proxies: Tensor,
        scale: float | Tensor,
        tiled: _Tiled,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad if grad_enabled else (False,) * 3
        value, ctx.ready = _class_pass(tiled, needs)
        _save(ctx, tiled, x, proxies, scale)
        return tiled.positive(), value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_positive: Tensor, grad_value: Tensor) -> Any:
        with torch.autocast(grad_value.device.type, enabled=False):
            tiled, *_ = _saved(ctx)
            # The gradients of forward are handed over, not copied; a second backward through the
            # same graph makes them anew.
            ready, ctx.ready = ctx.ready, None
            if ready is None:
                _, ready = _class_pass(tiled, ctx.needs_input_grad)
            for gradient in ready:
                if gradient is not None and not _is_one(grad_value):
                    gradient.mul_(grad_value)
            tiled.add_positive(ready, grad_positive)
            return *ready, None, None


def _class_pass(tiled: _Tiled, needs: tuple[bool, ...]) -> tuple[Tensor, _Gradients]:
    value = tiled.x.new_zeros(())
    gradients = tiled.empty_gradients(needs)
    for tile in tiled.tiles():
        s, inverse = tiled.cosines(tile)
        S = tiled.similarity(s)
        z = tiled.logits(tile, S)
        if tiled.bounded:
            e, shift = z.exp_(), value.new_zeros(())
        else:
            shift = z.amax(0).clamp_(min=0.0)
            e = z.sub_(shift).exp_()
        total = e.sum(0)
        share = tiled.problem.class_weight
        if isinstance(share, Tensor):
            share = share[tile.start : tile.stop]
        value += (log1p_sum_exp(total, shift) * share).sum()
        if any(needs):
            g = e.mul_(share / (total + torch.exp(-shift)))
            tiled.add_tile(gradients, tile, g, s, S, inverse)
    return value, gradients


class _BySample(torch.autograd.Function):
    """Log-sum-exp over the other classes, per sample: a running sum, then a second pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        proxies: Tensor,
        scale: float | Tensor,
        tiled: _Tiled,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        single = tiled.tile >= proxies.shape[0]
        floor = torch.finfo(x.dtype).min  # stands for -inf, but can be subtracted from -inf
        shift = x.new_full((x.shape[0], 1), 0.0 if tiled.bounded else floor)
        total = x.new_zeros(x.shape[0], 1)
        ctx.kept = None
        for tile in tiled.tiles():
            s, inverse = tiled.cosines(tile)
            S = tiled.similarity(s)
            z = tiled.logits(tile, S)
            if single and grad_enabled:
                ctx.kept = (tile, z.clone() if tiled.bounded else z, s, S, inverse)
            if tiled.bounded:
                total += z.exp_().sum(1, keepdim=True)
            else:
                peak = torch.maximum(shift, z.amax(1, keepdim=True))
                total = total * torch.exp(shift - peak) + (z - peak).exp_().sum(1, keepdim=True)
                shift = peak
        lse = (shift + total.log()).squeeze(1)
        _save(ctx, tiled, x, proxies, scale, lse)
        return tiled.positive(), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_positive: Tensor, grad_lse: Tensor) -> Any:
        with torch.autocast(grad_lse.device.type, enabled=False):
            tiled, lse = _saved(ctx)
            lse = lse.unsqueeze(1)
            lse = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
            gradients = tiled.empty_gradients(ctx.needs_input_grad)
            kept, ctx.kept = ctx.kept, None
            for tile in tiled.tiles():
                if kept is not None:
                    _, z, s, S, inverse = kept
                else:
                    s, inverse = tiled.cosines(tile)
                    S = tiled.similarity(s)
                    z = tiled.logits(tile, S)
                g = z.sub_(lse).exp_().mul_(grad_lse.unsqueeze(1))
                tiled.add_tile(gradients, tile, g, s, S, inverse)
            tiled.add_positive(gradients, grad_positive)
            return *gradients, None, None


def _save(ctx: Any, tiled: _Tiled, x: Tensor, proxies: Tensor, scale: Any, *more: Tensor) -> None:
    # `tiled` holds the inputs already; saved, autograd also notices if they change before backward.
    ctx.tiled = tiled
    ctx.save_for_backward(x, proxies, scale if isinstance(scale, Tensor) else None, *more)


def _saved(ctx: Any) -> tuple[Any, ...]:
    _, _, _, *more = ctx.saved_tensors
    return ctx.tiled, *more


def _is_one(grad: Tensor) -> bool:
    """Whether scaling can be skipped; a GPU is not asked, since the answer would have to wait."""
    return grad.device.type == "cpu" and grad.item() == 1.0
