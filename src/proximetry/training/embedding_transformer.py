"""`EmbeddingTransformer`: an embedder as a scikit-learn transformer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from proximetry._util.imports import import_optional
from proximetry._util.machine import resolve_device
from proximetry.data import Catalog, VectorCatalog
from proximetry.models import Embedder
from proximetry.recipe.schema import Recipe
from proximetry.training.trainer import train

base = import_optional("sklearn.base", None, "EmbeddingTransformer")


class EmbeddingTransformer(base.TransformerMixin, base.BaseEstimator):  # type: ignore[misc,name-defined]
    """Scikit-learn transformer that trains an embedder on vectors or image files.

    Works with `clone`, `Pipeline` and `GridSearchCV`. ``embedder_`` is the trained `Embedder`.

    Args:
        recipe: a shipped recipe's name or a YAML file; for images, such as default-cpu.
        overrides: keys of the recipe, such as {"model.dim": 64}.
        device: cpu, cuda or cuda:1; None selects CUDA if there is a GPU.

    Examples:
        >>> X = np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32)
        >>> y = np.arange(40) % 4
        >>> overrides = {"model.dim": 2, "training.epochs": 1, "data.batch_size": 20}
        >>> EmbeddingTransformer(overrides=overrides, device="cpu").fit(X, y).transform(X).shape
        (40, 2)
    """

    def __init__(
        self,
        recipe: str = "vectors",
        overrides: Mapping[str, Any] | None = None,
        device: str | None = None,
    ) -> None:
        self.recipe, self.overrides, self.device = recipe, overrides, device

    def fit(self, X: Any, y: Sequence[Any]) -> Self:
        """Train on vectors [N, dim] or image paths, with their labels."""
        recipe = Recipe.load(self.recipe, self.overrides)
        if isinstance(X[0], str | Path):
            paths, labels = tuple(map(str, X)), tuple(map(str, y))
            data = Catalog(paths, labels, ("all",) * len(paths))
        else:
            data = VectorCatalog.from_arrays(X, y)
        with TemporaryDirectory() as folder:
            train(recipe, folder, data=data, device=self.device)
            self.embedder_ = Embedder.load(Path(folder) / "embedder", resolve_device(self.device))
        return self

    def transform(self, X: Any) -> npt.NDArray[np.float32]:
        """Return the embeddings of vectors or images [N, dim]."""
        vectors: npt.NDArray[np.float32] = self.embedder_.encode(X).cpu().numpy()
        return vectors
