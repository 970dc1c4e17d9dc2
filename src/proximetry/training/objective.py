"""The training objective: the loss of the recipe and the terms added to it."""

from collections.abc import Sequence

from torch import Tensor, nn

from proximetry import losses
from proximetry._util.errors import UsageError
from proximetry.recipe.loading import RecipeError
from proximetry.recipe.schema import LossConfig


class Objective(nn.Module):
    """Loss and added terms in one module with one state dictionary.

    Args:
        config: the loss section of the recipe.
        class_names: of the classes, in the order of their labels.
        dim: dimension of the embedding.
        own: a custom loss that replaces that of the config.
    """

    def __init__(
        self,
        config: LossConfig,
        class_names: Sequence[str],
        dim: int,
        own: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.loss: nn.Module
        pairs, n = config.name.removeprefix("pairs/"), len(class_names)
        if own is not None:
            self.loss = own
            own_proxies = own.proxies if isinstance(own, losses.ProxyLoss) else None
            shape = own_proxies and (own_proxies.num_classes, own_proxies.dim)
            if shape and shape != (n, dim):
                raise UsageError(
                    f"loss {type(own).__name__} has {shape[0]} classes and {shape[1]} "
                    f"dimensions, but the run has {n} training classes (without held-out ones; "
                    f"evaluation.protocol last has none) and {dim} dimensions"
                )
        elif pairs != config.name:
            self.loss = losses.PairLoss(pairs, dim=dim, **config.settings)  # type: ignore[arg-type]
        else:
            self.loss = losses.create(config.name, n, dim, **config.settings)
        # The parameters of a custom loss have the learning rate of proxies.
        self.learns_as_proxies = own is not None and not isinstance(own, losses.ProxyLoss)
        if isinstance(self.loss, losses.ProxyLoss):
            self.loss.check_labels = False  # they come from the catalog
            self.loss.proxies.names = list(class_names)
        proxies = self.loss.proxies if isinstance(self.loss, losses.ProxyLoss) else None
        self.proxies = proxies
        self.projected = config.optimization == "projected"
        for key, is_set in (
            ("exclusive", config.exclusive),
            ("angular_center", config.angular_center),
            ("optimization", self.projected),
        ):
            if is_set and proxies is None:
                raise RecipeError(f"loss.{key} needs proxies; loss {config.name} has none")
        self.after_step()  # on the sphere from the start: the first step depends on their length
        self.exclusive = losses.ExclusiveRegularizer(config.exclusive) if config.exclusive else None
        self.angular_center = (
            losses.AngularCenterLoss(config.angular_center) if config.angular_center else None
        )

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the terms."""
        ramp = self.loss.ramp() if isinstance(self.loss, losses.ProxyLoss) else 1.0
        total: Tensor = self.loss(embeddings, labels)  # after which the ramp is the next step's
        if self.exclusive is not None and self.proxies is not None:
            total = total + ramp * self.exclusive(self.proxies)
        if self.angular_center is not None and self.proxies is not None:
            total = total + self.angular_center(embeddings, labels, self.proxies)
        return total

    def after_step(self) -> None:
        """Project the proxies onto the unit sphere, if the recipe sets it."""
        if self.projected and self.proxies is not None:
            self.proxies.project_()
