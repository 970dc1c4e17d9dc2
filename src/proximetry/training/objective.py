"""What is minimised: the loss of the recipe and the terms added to it."""

from collections.abc import Sequence

from torch import Tensor, nn

from proximetry import losses
from proximetry.losses.pairs import PairLoss
from proximetry.training.companions import Companions
from proximetry.training.recipe import Loss
from proximetry.training.recipe_values import RecipeError


class Objective(nn.Module):
    """Loss and what is added to it in one module, so that one state dictionary holds all.

    Args:
        recipe: what to minimise.
        class_names: of the classes, in the order of their labels.
        dim: width of the embedding.
        width: of the features behind it, which companions look at.
    """

    def __init__(self, recipe: Loss, class_names: Sequence[str], dim: int, width: int) -> None:
        super().__init__()
        self.recipe, self.dim, self.class_names = recipe, dim, list(class_names)
        self.loss = self._make_loss(dim)
        self.proxies = _proxies_of(self.loss)
        if self.proxies is None and (recipe.exclusive or recipe.project):
            raise RecipeError(
                f"loss.exclusive and loss.project need proxies; {recipe.name} has none"
            )
        classes = len(class_names)
        self.exclusive = losses.ExclusiveRegularizer(recipe.exclusive) if recipe.exclusive else None
        self.center = losses.CenterLoss(classes, dim, recipe.center) if recipe.center else None
        self.companions: Companions | None = None
        if recipe.companions:
            self.companions = Companions(
                width,
                recipe.companions,
                self._make_loss,
                recipe.distill,
                recipe.distill_temperature,
            )

    def _make_loss(self, dim: int) -> losses.ProxyLoss | PairLoss:
        name = self.recipe.name
        try:
            if name.startswith("pairs/"):
                settings: dict[str, float] = dict(self.recipe.settings)  # type: ignore[arg-type]
                return PairLoss(name.removeprefix("pairs/"), dim=dim, **settings)  # type: ignore[arg-type]
            loss = losses.create(name, len(self.class_names), dim, **self.recipe.settings)
        except ValueError as error:
            raise RecipeError(f"loss: {error}") from error
        loss.check_labels = False  # they come from the catalogue
        loss.proxies.names = self.class_names
        return loss

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the terms; companions want the features behind the embeddings."""
        if self.companions is None:
            return self._main(embeddings, labels)
        embeddings, features = embeddings[:, : self.dim], embeddings[:, self.dim :]
        beside: Tensor = self.companions(embeddings, features, labels)
        return self._main(embeddings, labels) + beside

    def _main(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        total: Tensor = self.loss(embeddings, labels)
        if self.exclusive is not None and self.proxies is not None:
            total = total + self.exclusive(self.proxies)
        if self.center is not None:
            total = total + self.center(embeddings, labels)
        return total

    def after_step(self) -> None:
        """Project the proxies, where the recipe asks for it."""
        if self.recipe.project:
            for proxies in self._all_proxies():
                proxies.project_()

    def parameter_parts(self) -> dict[str, list[nn.Parameter]]:
        """Return the parameters by how they learn: proxies, head (companions'), loss (the rest)."""
        parts: dict[str, list[nn.Parameter]] = {
            "proxies": [proxies.weight for proxies in self._all_proxies()],
            "head": [] if self.companions is None else [*self.companions.heads.parameters()],
        }
        special = {id(parameter) for part in parts.values() for parameter in part}
        return {**parts, "loss": [p for p in self.parameters() if id(p) not in special]}

    def _all_proxies(self) -> list[losses.Proxies]:
        every = [self.loss, *(self.companions.losses if self.companions is not None else ())]
        return [proxies for loss in every if (proxies := _proxies_of(loss)) is not None]


def _proxies_of(loss: nn.Module) -> losses.Proxies | None:
    return loss.proxies if isinstance(loss, losses.ProxyLoss) else None
