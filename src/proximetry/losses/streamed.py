"""The streamed engine: the dense engine's result, computed in tiles of classes.

Memory is O(batch · tile) beyond the proxies and their gradient, never batch × classes × K. For
class-wise losses, forward also computes the gradients of each tile. For losses by sample or entry,
forward keeps a running sum and backward recomputes the tiles, unless there is only one. The
similarities of the samples to their class are computed from gathered proxies, outside the
tiles, so that autograd handles any margin.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proximetry._util.machine import by_device
from proximetry._util.tensors import chunks, inner_products, inverse_length
from proximetry.losses.dense import (
    add_rows_,
    cosines,
    dense,
    distance_terms,
    intra_class_distance,
    log1p_sum_exp,
    pair_distance_gradient,
    reduce_proxies,
    softplus,
    spread_gradient,
)
from proximetry.losses.form import Parts, Problem

#: Maximum number of entries in a batch × tile × K block. On a GPU it should occupy the device. On a
#: CPU, threads synchronize after every operation, which is slow on a busy machine.
TILE_ENTRIES = {"cpu": 2**21, "cuda": 2**26}

#: Below this |logit| the exponential neither overflows nor underflows in float32 (e^60 ≈ 1e26), and
#: the maximum is not subtracted.
SAFE_EXPONENT = 60.0


def streamed(problem: Problem, tile: int | None = None) -> Parts:
    """Solve the same problem as `dense` in tiles of ``tile`` classes."""
    classes, k, _ = problem.proxies.shape
    if tile is None:
        tile = max(1, by_device(problem.x.device, **TILE_ENTRIES) // (len(problem.x) * k))
    inputs = [problem.x, problem.proxies, problem.scale, problem.offset]
    if not torch.is_grad_enabled():  # `needs_input_grad` ignores no_grad: detach
        inputs = [value.detach() if isinstance(value, Tensor) else value for value in inputs]
    function = _ByClass if problem.form.by == "class" else _BySample
    tiled = _Tiled(problem, min(tile, classes))
    return Parts(*function.apply(tiled, *inputs))  # type: ignore[no-untyped-call]


class _Gradients(NamedTuple):
    x: Tensor | None
    proxies: Tensor | None
    scale: Tensor | None
    offset: Tensor | None


class _Tiled:
    """A problem in tiles, with the steps shared by class-wise and sample-wise losses."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem = problem
        self.x, self.labels = problem.x, problem.labels
        self.rows = self.labels  # of the positives
        if problem.is_shard:  # rows for labels of other ranks are not used
            self.rows = self.labels.clamp(0, len(problem.proxies) - 1)
        self.proxies = problem.proxies.contiguous()
        self.reduction = problem.form.similarity, problem.gamma
        scale = problem.scale
        self.scale = scale.unsqueeze(1) if isinstance(scale, Tensor) else scale
        self.offset = problem.offset
        if not isinstance(self.offset, Tensor):
            # Filled on the device: a copy from the CPU would synchronize.
            self.offset = self.x.new_full((), self.offset)
        self.class_weight, self.needs_total = problem.class_weight, problem.needs_total
        self.is_by_entry = problem.form.by == "entry"
        bounds = (scale, problem.offset)
        bound = sum(torch.inf if isinstance(value, Tensor) else abs(value) for value in bounds)
        self.is_bounded = bound < SAFE_EXPONENT and not self.is_by_entry
        self.is_bounded &= problem.form.adjust is None
        if problem.log_weights is not None:
            self.offset = problem.log_weights + self.offset
            self.is_bounded &= not problem.has_weights
        if self.offset.ndim:
            self.offset = self.offset.unsqueeze(1)
        self.tiles = list(chunks(len(self.proxies), size))

    def logits(self, tile: slice) -> tuple[Any, ...]:
        """Return the negative logits [B, T] of a tile, -inf where the class is the sample's.

        Also return the cosines [K, B, T], the similarities [B, T], the inverse lengths [T, K] of
        the proxies, φ(S) and its derivative, which is None without `LossForm.adjust`.
        """
        s, inverse = cosines(self.x, self.proxies[tile])
        S = reduce_proxies(s, *self.reduction)
        phi, slope = self.problem.adjust(S)
        if isinstance(self.scale, float):
            z = torch.add(self.offset, phi, alpha=self.scale)
        else:
            z = (phi * self.scale).add_(self.offset)
        column, width = (self.labels - tile.start).unsqueeze(1), z.shape[1]
        inside = (column >= 0) & (column < width)
        column.clamp_(0, width - 1)
        z.scatter_(1, column, z.gather(1, column).masked_fill(inside, -torch.inf))
        if self.problem.ignore_above is not None:
            z.masked_fill_(S > self.problem.ignore_above, -torch.inf)
        return z, s, S, inverse, phi, slope

    def weigh_classes(self, values: Tensor, tile: slice) -> Tensor:
        """Multiply the entries [B, T] of a tile by the weights of the classes, in place."""
        weight = self.class_weight
        if weight is None:
            return values
        return values.mul_(weight[tile] if isinstance(weight, Tensor) else weight)

    def empty_gradients(self, needs: Sequence[bool]) -> _Gradients:
        """Allocate the gradients; with `Problem.update`, that of the proxies is one tile."""
        rows = len(self.proxies) if self.problem.update is None else self.tiles[0].stop
        return _Gradients(
            torch.zeros_like(self.x) if needs[0] else None,
            torch.empty_like(self.proxies[:rows]) if needs[1] else None,
            *(self.x.new_zeros(len(self.x)) if needed else None for needed in needs[2:]),
        )

    def add_tile(
        self,
        gradients: _Gradients,
        tile: slice,
        g: Tensor,
        s: Tensor,
        S: Tensor,
        inverse: Tensor,
        phi: Tensor,
        slope: Tensor | None,
        *,
        direct: Tensor | None = None,
    ) -> None:
        """Add the gradients of all inputs from ``g`` = ∂L/∂logit; overwrite g and s.

        ``direct`` [B] is the gradient of the sum of a sample's similarities. With `Problem.update`
        the gradient of the proxies overwrites that of the previous tile.
        """
        if gradients.scale is not None:
            gradients.scale.add_((g * phi).sum(1))
        if gradients.offset is not None:
            gradients.offset.add_(g.sum(1))
        g.mul_(self.scale)
        if slope is not None:
            g.mul_(slope)
        if direct is not None:
            g.add_(direct.unsqueeze(1))
        g = spread_gradient(g, s, S, *self.reduction)
        # d cos / dw = (x − cos · ŵ) / ‖w‖; the second part is one number per proxy.
        radial = s.mul_(g).sum(1).T.mul(inverse.square()).neg_().reshape(-1, 1)
        w = self.proxies[tile].flatten(0, 1)
        g = g.permute(1, 2, 0).reshape(-1, len(w)).mul_(inverse.view(-1))  # [B, T·K]
        if gradients.x is not None:
            gradients.x.add_(inner_products(g, w.T))
        if gradients.proxies is not None:
            is_whole = self.problem.update is None
            out = gradients.proxies[tile if is_whole else slice(tile.stop - tile.start)].view_as(w)
            torch.addcmul(inner_products(g.T, self.x.T), w, radial, out=out)

    def positive(self) -> Tensor:
        """Return each sample's similarity to its class [B]."""
        return reduce_proxies(self.positives()[2], *self.reduction)

    def distance(self) -> Tensor | None:
        """Return the intra-class distance."""
        return intra_class_distance(self.proxies) if self.problem.needs_distance else None

    def positives(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the proxies of each sample's class, 1 / length and cosines [K, B]."""
        w = self.proxies[self.rows]  # [B, K, D]
        inverse = inverse_length(w)[0].T  # [K, B]
        return w, inverse, torch.einsum("bd,bkd->kb", self.x, w) * inverse


class _Finish:
    """Adds the gradients of the positives and of the intra-class distance, and updates proxies."""

    def __init__(self, tiled: _Tiled, grad: Tensor, grad_distance: Tensor | None) -> None:
        self.tiled, self.grad_distance = tiled, grad_distance
        w, inverse, s = tiled.positives()
        S = reduce_proxies(s, *tiled.reduction)
        g = spread_gradient(grad, s, S, *tiled.reduction) * inverse  # [K, B]
        self.x = torch.einsum("kb,bkd->bd", g, w)
        self.pull = g.T.unsqueeze(2) * tiled.x.unsqueeze(1)  # [B, K, D]
        self.pull -= (g * s * inverse).T.unsqueeze(2) * w

    def tile(self, gradients: _Gradients, tile: slice) -> None:
        """Complete the proxy gradient of a tile and pass it to `Problem.update`, if set."""
        update = self.tiled.problem.update
        if update is not None and gradients.proxies is not None:
            gradient = gradients.proxies[: tile.stop - tile.start]
            self._add(tile, gradient)
            update(tile, gradient)

    def complete(self, gradients: _Gradients) -> _Gradients:
        """Return the complete gradients; that of updated proxies is None."""
        if gradients.x is not None:
            gradients.x.add_(self.x)
        if self.tiled.problem.update is not None:
            return gradients._replace(proxies=None)
        if gradients.proxies is not None:
            self._add(slice(0, len(gradients.proxies)), gradients.proxies)
        return gradients

    def _add(self, tile: slice, gradient: Tensor) -> None:
        proxies, k = self.tiled.proxies, gradient.shape[1]
        column = self.tiled.labels - tile.start
        inside = (column >= 0) & (column < len(gradient))
        pull = self.pull * inside.view(-1, 1, 1)
        add_rows_(gradient, column.clamp(0, len(gradient) - 1), pull)
        if self.grad_distance is not None and k > 1:
            grad = self.grad_distance / distance_terms(proxies)
            gradient += pair_distance_gradient(proxies[tile], grad)


def _save(ctx: Any, tiled: _Tiled, *tensors: Any) -> None:
    # `tiled` has the inputs; autograd checks saved tensors for changes before backward.
    ctx.tiled = tiled
    ctx.save_for_backward(*(tensor for tensor in tensors if isinstance(tensor, Tensor)))


def dense_gradients(ctx: Any, problem: Problem, *grads: Tensor | None) -> Any:
    """Return the gradients of the dense engine, which are differentiable."""
    _ = ctx.saved_tensors  # raises if an input has changed
    needs = ctx.needs_input_grad[1:]
    inputs = (problem.x, problem.proxies, problem.scale, problem.offset)
    needed: Any = [value for value, is_needed in zip(inputs, needs, strict=True) if is_needed]
    with torch.autocast(problem.x.device.type, enabled=False):
        parts = zip(dense(problem), grads, strict=True)
        outputs, grad_outputs = zip(*(pair for pair in parts if pair[0] is not None), strict=True)
        gradients = iter(torch.autograd.grad(outputs, needed, grad_outputs, create_graph=True))
    return None, *(next(gradients) if is_needed else None for is_needed in needs)


class _ByClass(torch.autograd.Function):
    """Negative term of a class-wise loss: value and gradients in one pass."""

    @staticmethod
    def forward(ctx: Any, tiled: _Tiled, *inputs: Any) -> Any:
        weight, ctx.gradients = tiled.class_weight, None
        if weight is None:  # the gradients depend on those of the terms
            value = tiled.x.new_empty(len(tiled.proxies))
            _class_pass(tiled, [False] * 4, 0.0, terms=value)
        elif tiled.problem.update is not None:  # the update needs the gradients of backward
            value, _ = _class_pass(tiled, [False] * 4, weight)
        else:
            value, ctx.gradients = _class_pass(tiled, ctx.needs_input_grad[1:], weight)
        _save(ctx, tiled, *inputs)
        return tiled.positive(), value, None, tiled.distance()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tiled: _Tiled = ctx.tiled
        if torch.is_grad_enabled():  # create_graph=True
            return dense_gradients(ctx, tiled.problem, *grads)
        grad_positive, grad_value, _, grad_distance = grads
        assert grad_positive is not None
        assert grad_value is not None
        with torch.autocast(grad_value.device.type, enabled=False):
            _ = ctx.saved_tensors  # raises if an input has changed
            finish = _Finish(tiled, grad_positive, grad_distance)
            # The gradients of forward are used once; a second backward recomputes them.
            gradients, ctx.gradients = ctx.gradients, None
            if gradients is None:
                factor, weight = grad_value, tiled.class_weight
                if weight is not None:
                    factor = (grad_value * weight).expand(len(tiled.proxies))
                _, gradients = _class_pass(tiled, ctx.needs_input_grad[1:], factor, finish)
            # On a GPU the comparison with 1 would synchronize.
            elif grad_value.device.type != "cpu" or grad_value.item() != 1.0:
                for gradient in gradients:
                    if gradient is not None:
                        gradient.mul_(grad_value)
            return None, *finish.complete(gradients)


def _class_pass(
    tiled: _Tiled,
    needs: Sequence[bool],
    class_weight: float | Tensor,
    finish: "_Finish | None" = None,
    terms: Tensor | None = None,
) -> tuple[Tensor, _Gradients]:
    """Return the weighted sum of the terms and its gradients; write the terms to ``terms`` [C]."""
    value = tiled.x.new_zeros(())
    gradients = tiled.empty_gradients(needs)
    for tile in tiled.tiles:
        z, *parts = tiled.logits(tile)
        if tiled.is_bounded:
            e, shift = z.exp_(), value.new_zeros(())
        else:
            shift = z.amax(0).clamp_(min=0.0)
            e = z.sub_(shift).exp_()
        total = e.sum(0)
        weight = class_weight[tile] if isinstance(class_weight, Tensor) else class_weight
        term = log1p_sum_exp(total, shift)
        if terms is not None:
            terms[tile] = term
        value += (term * weight).sum()
        if any(needs):
            g = e.mul_(weight / (total + torch.exp(-shift)))
            tiled.add_tile(gradients, tile, g, *parts)
            if finish is not None:
                finish.tile(gradients, tile)
    return value, gradients


class _BySample(torch.autograd.Function):
    """Log-sum-exp over the other classes of a sample: a running sum, and a pass for gradients.

    By entry: the sum of log(1 + exp logit), with the weights of the classes.
    """

    @staticmethod
    def forward(ctx: Any, tiled: _Tiled, *inputs: Any) -> Any:
        x = tiled.x
        floor = torch.finfo(x.dtype).min  # instead of -inf, since -inf − (-inf) is NaN
        shift = x.new_full((len(x), 1), 0.0 if tiled.is_bounded else floor)
        total = x.new_zeros(len(x), 1)
        sum_similarity = x.new_zeros(len(x)) if tiled.needs_total else None
        ctx.only_tile = None
        for tile in tiled.tiles:
            z, *parts = tiled.logits(tile)
            if len(tiled.tiles) == 1 and any(ctx.needs_input_grad):
                ctx.only_tile = (z.clone() if tiled.is_bounded else z, *parts)
            if sum_similarity is not None:
                sum_similarity += parts[1].sum(1)
            if tiled.is_by_entry:
                total += tiled.weigh_classes(softplus(z), tile).sum(1, keepdim=True)
            elif tiled.is_bounded:
                total += z.exp_().sum(1, keepdim=True)
            else:
                peak = torch.maximum(shift, z.amax(1, keepdim=True))
                total = total * torch.exp(shift - peak) + (z - peak).exp_().sum(1, keepdim=True)
                shift = peak
        lse = (total if tiled.is_by_entry else shift + total.log()).squeeze(1)
        _save(ctx, tiled, *inputs, lse)
        return tiled.positive(), lse, sum_similarity, tiled.distance()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        tiled: _Tiled = ctx.tiled
        if torch.is_grad_enabled():  # create_graph=True
            return dense_gradients(ctx, tiled.problem, *grads)
        grad_positive, grad_lse, grad_total, grad_distance = grads
        assert grad_positive is not None
        assert grad_lse is not None
        with torch.autocast(grad_lse.device.type, enabled=False):
            *_, lse = ctx.saved_tensors
            lse = lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(1)
            finish = _Finish(tiled, grad_positive, grad_distance)
            gradients = tiled.empty_gradients(ctx.needs_input_grad[1:])
            only_tile, ctx.only_tile = ctx.only_tile, None
            for tile in tiled.tiles:
                z, *parts = only_tile or tiled.logits(tile)
                if tiled.is_by_entry:
                    g = tiled.weigh_classes(z.sigmoid_(), tile)
                else:
                    g = z.sub_(lse).exp_()
                g.mul_(grad_lse.unsqueeze(1))
                tiled.add_tile(gradients, tile, g, *parts, direct=grad_total)
                finish.tile(gradients, tile)
            return None, *finish.complete(gradients)
