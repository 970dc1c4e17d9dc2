"""Optimizers that update the proxies during backward, so that their gradient is never stored.

    loss = ProxyAnchor(10_000_000, 512)
    loss.proxy_optimizer = RowwiseAdam(loss.proxies, lr=1e-2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # without the proxies

The engine passes the gradient of a tile of classes to the optimizer as soon as it is complete. A
step equals that of the same rule with the whole gradient. ``loss.proxies.weight.grad`` stays None:
the gradient cannot be clipped or accumulated, and other terms of the proxies, such as an exclusive
regularizer, need an ordinary optimizer. Create the optimizer after `shard` and `grow`.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from proximetry.losses.proxies import Proxies
from proximetry.losses.settings import FullPrecision, non_negative, number, positive

decay_rate = number("0 ≤ float < 1", 0.0, 1.0 - 2**-53, "at least 0 and below 1")


class ProxyOptimizer(FullPrecision):
    """Base of the optimizers; its buffers are the state, saved with the loss.

    A subclass that overrides `update` must also override `fused_update`.
    """

    def __init__(self, proxies: Proxies, lr: float, weight_decay: float) -> None:
        super().__init__()
        self.lr = positive("lr", lr)
        self.weight_decay = non_negative("weight_decay", weight_decay)
        self._proxies = [proxies]  # in a list, so as not to register them as a submodule
        self._shape = proxies.weight.shape

    def check(self, proxies: Proxies) -> None:
        """Raise if these are not the proxies of the optimizer."""
        if proxies is not self._proxies[0] or proxies.weight.shape != self._shape:
            raise ValueError(
                "the proxies have changed. Create the proxy optimizer after shard() and grow()."
            )

    @torch.no_grad()
    def update(self, classes: slice, gradient: Tensor) -> None:
        """Update the proxies of some classes, given their gradient, which is overwritten."""
        raise NotImplementedError

    def fused_update(self, classes: slice, gradient: Tensor) -> None:
        """Update the proxies of some classes in one kernel, for the fused engine."""
        self.update(classes, gradient)

    def rows(self, classes: slice) -> Tensor:
        """Return the proxies of some classes."""
        return self._proxies[0].weight[classes]


class ProxySGD(ProxyOptimizer):
    """SGD with momentum and weight decay, like `torch.optim.SGD`.

    ``m ← momentum · m + g + weight_decay · w; w ← w − lr · m``. The state is as large as the
    proxies, or empty if ``momentum`` is 0.
    """

    def __init__(
        self, proxies: Proxies, lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(proxies, lr, weight_decay)
        self.momentum = decay_rate("momentum", momentum)
        self.mean: Tensor | None
        mean = torch.zeros_like(proxies.weight.detach()) if momentum else None
        self.register_buffer("mean", mean)

    @torch.no_grad()
    def update(self, classes: slice, gradient: Tensor) -> None:
        """Update the proxies of some classes, given their gradient, which is overwritten."""
        rows = self.rows(classes)
        gradient.add_(rows, alpha=self.weight_decay)
        if self.mean is not None:
            gradient = self.mean[classes].mul_(self.momentum).add_(gradient)
        rows.sub_(gradient, alpha=self.lr)

    @torch.no_grad()
    def fused_update(self, classes: slice, gradient: Tensor) -> None:
        """Update the proxies of some classes in one kernel, for the fused engine."""
        from proximetry.losses.fused import is_aligned, launcher  # needs Triton
        from proximetry.losses.fused_kernels import update_by_sgd

        weight, n, block = self._proxies[0].weight, gradient.numel(), 2048
        if not is_aligned(weight):
            return self.update(classes, gradient)
        launch = launcher(update_by_sgd, MEAN=self.mean is not None, BLOCK=block)
        numbers = map(float, (self.lr, self.momentum, self.weight_decay))
        start = classes.start * weight[0].numel()
        launch((-(-n // block),), weight, gradient, self.mean, *numbers, start, n)
        increment_version(weight)


class RowwiseAdam(ProxyOptimizer):
    """Adam with one second moment for each proxy, and decoupled weight decay.

    ``m ← β₁ m + (1 − β₁) g; v ← β₂ v + (1 − β₂) mean(g²); w ← w − lr · (m̂ / (√v̂ + ε) + λ w)``,
    where the mean is over the dimensions of a proxy, λ is ``weight_decay``, and m̂ and v̂ are
    bias-corrected as in Adam. With β₁ = 0 the state is one number per proxy.
    """

    second: Tensor
    step: Tensor
    corrections: Tensor  # 1 − β^step of both moments

    def __init__(
        self,
        proxies: Proxies,
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(proxies, lr, weight_decay)
        self.betas = decay_rate("betas[0]", betas[0]), decay_rate("betas[1]", betas[1])
        self.eps = positive("eps", eps)
        weight = proxies.weight.detach()
        self.first: Tensor | None
        self.register_buffer("first", torch.zeros_like(weight) if betas[0] else None)
        self.register_buffer("second", weight.new_zeros(*weight.shape[:2], 1))
        self.register_buffer("step", torch.zeros((), dtype=torch.float64, device=weight.device))

    @torch.no_grad()
    def update(self, classes: slice, gradient: Tensor) -> None:
        """Update the proxies of some classes, given their gradient, which is overwritten."""
        self._begin(classes)
        rows, second = self.rows(classes), self.second[classes]
        first_decay, second_decay = self.betas
        second.lerp_(gradient.square().mean(2, keepdim=True), 1 - second_decay)
        corrected = second / self.corrections[1]
        if self.first is not None:
            first = self.first[classes].lerp_(gradient, 1 - first_decay)
            torch.div(first, self.corrections[0], out=gradient)
        gradient.div_(corrected.sqrt_().add_(self.eps))
        rows.mul_(1 - self.lr * self.weight_decay).sub_(gradient, alpha=self.lr)

    @torch.no_grad()
    def fused_update(self, classes: slice, gradient: Tensor) -> None:
        """Update the proxies of some classes in one kernel, for the fused engine."""
        from proximetry.losses.fused import is_aligned, launcher, power_of_2  # needs Triton
        from proximetry.losses.fused_kernels import update_by_rowwise_adam

        weight = self._proxies[0].weight
        if not is_aligned(weight):
            return self.update(classes, gradient)
        self._begin(classes)
        _, k, dim = weight.shape
        launch = launcher(
            update_by_rowwise_adam, DIM=dim, FIRST=self.first is not None, BD=power_of_2(dim)
        )
        numbers = map(float, (self.lr, *self.betas, self.eps, self.weight_decay))
        launch(
            (gradient.numel() // dim,), weight, gradient, self.first, self.second,
            self.corrections, *numbers, classes.start * k,
        )  # fmt: skip
        increment_version(weight)

    def _begin(self, classes: slice) -> None:
        """Count the step at the first tile of a backward pass."""
        if classes.start == 0:
            self.step.add_(1)
            corrections = torch.stack([1 - decay**self.step for decay in self.betas])
            self.corrections = corrections.to(self.second.dtype)
