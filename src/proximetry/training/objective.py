"""What is minimised: the loss of the recipe and the terms added to it."""

from collections.abc import Sequence

from torch import Tensor, nn

from proximetry import losses
from proximetry.recipe.loading import RecipeError
from proximetry.recipe.schema import LossConfig


class Objective(nn.Module):
    """Loss and added terms in one module, so that one state dictionary holds all.

    Args:
        config: what to minimise.
        class_names: of the classes, in the order of their labels.
        dim: dimension of the embedding.
        own: the user's loss, in place of that of the config.
    """

    def __init__(
        self,
        config: LossConfig,
        class_names: Sequence[str],
        dim: int,
        own: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.loss: nn.Module = _make_loss(config, class_names, dim) if own is None else own
        # Parameters of a loss of one's own are proxies, or learn like them.
        self.learns_as_proxies = own is not None and not isinstance(own, losses.ProxyLoss)
        if isinstance(self.loss, losses.ProxyLoss):
            self.loss.check_labels = False  # they come from the catalogue
            self.loss.proxies.names = list(class_names)
        proxies = self.loss.proxies if isinstance(self.loss, losses.ProxyLoss) else None
        wanting = [
            f"loss.{key}"
            for key, wanted in (
                ("exclusive", config.exclusive),
                ("angular_center", config.angular_center),
                ("optimization", config.optimization == "projected"),
            )
            if wanted
        ]
        if proxies is None and wanting:
            raise RecipeError(f"{wanting[0]} needs proxies; loss {config.name} has none")
        self.proxies = proxies
        self.projected = config.optimization == "projected"
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
        """Project the proxies onto the unit sphere, where the recipe asks for it."""
        if self.projected and self.proxies is not None:
            self.proxies.project_()


def _make_loss(
    config: LossConfig, class_names: Sequence[str], dim: int
) -> losses.ProxyLoss | losses.PairLoss:
    if config.name.startswith("pairs/"):
        return losses.PairLoss(config.name.removeprefix("pairs/"), dim=dim, **config.settings)  # type: ignore[arg-type]
    return losses.create(config.name, len(class_names), dim, **config.settings)
