"""What is minimised: the loss of the recipe and the terms added to it."""

from collections.abc import Sequence

from torch import Tensor, nn

from proximetry import losses
from proximetry.losses.pairs import PairLoss
from proximetry.training.recipe import Loss
from proximetry.training.recipe_values import RecipeError


class Objective(nn.Module):
    """Loss and regularisers in one module, so that one state dictionary holds them all."""

    def __init__(self, recipe: Loss, class_names: Sequence[str], dim: int) -> None:
        super().__init__()
        classes = len(class_names)
        self.loss: losses.ProxyLoss | PairLoss
        try:
            if recipe.name.startswith("pairs/"):
                settings: dict[str, float] = dict(recipe.settings)  # type: ignore[arg-type]
                self.loss = PairLoss(recipe.name.removeprefix("pairs/"), dim=dim, **settings)  # type: ignore[arg-type]
            else:
                self.loss = losses.create(recipe.name, classes, dim, **recipe.settings)
        except ValueError as error:
            raise RecipeError(f"loss: {error}") from error
        proxies = self.loss.proxies if isinstance(self.loss, losses.ProxyLoss) else None
        if proxies is not None:
            assert isinstance(self.loss, losses.ProxyLoss)
            proxies.names = list(class_names)
            self.loss.check_labels = False  # they come from the catalogue
        elif recipe.exclusive or recipe.project:
            raise RecipeError(
                f"loss.exclusive and loss.project need proxies; {recipe.name} has none"
            )
        self.proxies = proxies
        self.exclusive = losses.ExclusiveRegularizer(recipe.exclusive) if recipe.exclusive else None
        self.center = losses.CenterLoss(classes, dim, recipe.center) if recipe.center else None
        self.project = recipe.project

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the terms."""
        total: Tensor = self.loss(embeddings, labels)
        if self.exclusive is not None and self.proxies is not None:
            total = total + self.exclusive(self.proxies)
        if self.center is not None:
            total = total + self.center(embeddings, labels)
        return total

    def after_step(self) -> None:
        """Project the proxies, where the recipe asks for it."""
        if self.project and self.proxies is not None:
            self.proxies.project_()

    def parameter_parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the proxies, and the other parameters."""
        proxies = [] if self.proxies is None else [self.proxies.weight]
        special = {id(parameter) for parameter in proxies}
        return proxies, [p for p in self.parameters() if id(p) not in special]
