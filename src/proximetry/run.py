"""`train`, which trains an embedder on a folder of images, and `Run`, a finished run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proximetry import training
from proximetry._util.errors import UsageError
from proximetry.models import Embedder
from proximetry.training.plan import make_plan
from proximetry.training.reporting import make_display

if TYPE_CHECKING:
    from proximetry.metrics import Evaluation
    from proximetry.search import Gallery


class Run:
    """A finished training run in its folder.

    Attributes:
        path: the folder.
        recipe: the complete recipe.
        results: the metrics, as in results.json.

    Examples:
        >>> import proximetry as px
        >>> run = px.Run("runs/photos")  # doctest: +SKIP
        >>> run.results["selected"]["held_out"]["map@r"]  # doctest: +SKIP
        >>> run.report()  # doctest: +SKIP
        >>> run.index("photos").search("query.jpg").show()  # doctest: +SKIP
    """

    def __init__(self, path: str | os.PathLike[str], device: str | None = None) -> None:
        """Open the folder of a run; `device` is for its embedder."""
        from proximetry.reports import RunRecord

        self.path, self._device = Path(path), device
        self._record = RunRecord.read(self.path)
        self.recipe, self.results = self._record.recipe, self._record.results
        if not self.results:
            raise UsageError(
                f"the run in {self.path} is not finished. Resume it with train(), or load its "
                "embedder with Embedder.load()."
            )

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @cached_property
    def embedder(self) -> Embedder:
        """The trained embedder."""
        return Embedder.load(self.path, self._device)

    def evaluate(self, images: str | os.PathLike[str] | None = None) -> Evaluation:
        """Evaluate the embedder on retrieval metrics.

        Args:
            images: a folder of class folders, a table, a tar file or a dataset; by default the
                images that the run was evaluated on.
        """
        from proximetry.reports import evaluate_run

        source = None if images is None else os.fspath(images)
        return evaluate_run(self._record, source).evaluation

    def report(
        self,
        out: str | os.PathLike[str] | None = None,
        images: str | os.PathLike[str] | None = None,
    ) -> Path:
        """Write the report of the run to one HTML file; return its path.

        Args:
            out: the file; by default report.html in the folder of the run.
            images: other images to evaluate on, as for `evaluate`.
        """
        from proximetry.reports import write_report

        page = self.path / "report.html" if out is None else Path(out)
        write_report([self.path], page, source=None if images is None else os.fspath(images))
        return page

    def extend(
        self,
        new_images: str | os.PathLike[str],
        out: str | os.PathLike[str] | None = None,
        *,
        epochs: int | None = None,
        keep_space: bool = False,
        **options: Any,
    ) -> Run:
        """Add classes to the run, in another folder, as `proximetry extend` does.

        Args:
            new_images: images of new classes, as for `train`; those of known classes are added to
                these classes.
            out: folder of the new run; by default that of this run with a number: runs/mine-2.
            epochs: by default a third of those of this run, at least three.
            keep_space: keep the embedder unchanged, so that galleries remain valid.
            options: further arguments of `proximetry.training.extend`, such as `root`.

        Returns:
            The new run; ``results["extension"]`` compares old and new classes.
        """
        from proximetry.training.extension import default_out

        path = default_out(self.path) if out is None else Path(out)
        options = {"device": self._device, "display": make_display()} | options
        training.extend(
            self.path, new_images, path, epochs=epochs, keep_space=keep_space, **options
        )
        return Run(path, self._device)

    def distill(
        self,
        out: str | os.PathLike[str],
        backbone: str,
        *,
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Run:
        """Train a smaller network that follows this run, as `proximetry distill` does.

        Args:
            out: folder of the new run.
            backbone: name of the network.
            settings: further keys of the recipe to override.
            options: further arguments of `proximetry.training.distill`, such as `recipe`.
        """
        settings = {"model.backbone": backbone, **(settings or {})}
        options = {"device": self._device, "display": make_display()} | options
        training.distill(self.path, out, settings, **options)
        return Run(out, self._device)

    def index(
        self, images: Any, out: str | os.PathLike[str] | None = None, **options: Any
    ) -> Gallery:
        """Build a gallery of images with the embedder; see `proximetry.index`."""
        from proximetry.search import index

        return index(images, out, self.embedder, **options)


def train(
    images: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    recipe: str | None = None,
    settings: Mapping[str, Any] | None = None,
    device: str | None = None,
    resume: bool = True,
    **options: Any,
) -> Run:
    """Train an embedder on your images, as `proximetry train` does.

    An unfinished run in the folder is resumed; a finished one is returned.

    Args:
        images: a folder of class folders, a table, a tar file, a file of vectors or a dataset; or
            a recipe that names its data.
        out: folder of the run; by default in runs/, named after the images.
        recipe: name or YAML file of a recipe; by default "default" on a CUDA device and
            "default-cpu" elsewhere.
        settings: keys of the recipe to override, such as {"training.epochs": 5}.
        device: such as "cpu" or "cuda:1"; by default CUDA if there is a GPU.
        resume: whether to resume a run in the folder; if False, it is removed.
        options: further arguments of `proximetry.training.train`, such as `loss` and `callbacks`.

    Returns:
        The finished run.

    Examples:
        >>> import proximetry as px
        >>> run = px.train("photos", settings={"training.epochs": 5})  # doctest: +SKIP
        >>> run.embedder.encode("photo.jpg").shape  # doctest: +SKIP
    """
    folder = None if out is None else Path(out)
    plan = make_plan(os.fspath(images), folder, recipe, settings or {}, device, not resume)
    display = options.pop("display", None) or make_display()
    for line in plan.lines if os.environ.get("RANK", "0") == "0" else ():
        display.message(line)
    training.train(plan.recipe, plan.out, device=device, resume=resume, display=display, **options)
    return Run(plan.out, device)
