"""The recipe of a run: typed, checked on construction, one to one with YAML.

Unknown or mistyped keys are errors. A recipe says everything about a run except where the data
lie (``data.root``) and where the results go.
"""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from proximetry._common import atomic_write, closest
from proximetry.data.colours import ColourTransform
from proximetry.losses import LOSSES
from proximetry.training.recipe_values import (
    RecipeError,
    build,
    check_choice,
    check_not_negative,
    check_positive,
    plain,
    require,
)

Setting = bool | int | float | str


Sampler = Literal["shuffled", "balanced"]
CachePlace = Literal["disk", "memory", "gpu"]
BadImages = Literal["error", "skip"]


@dataclass
class Data:
    """Which images, and how they become batches.

    Args:
        dataset: glyphs, folder, csv, parquet, shards, faces, cub, cars, sop or inshop.
        root: where the images lie; glyphs need none.
        short_side: short side of the images in the pixel cache; default: the model's resize.
        crop_size: side of the training crops; default: the model's image_size. Smaller crops than
            in evaluation make up for objects looking larger in random crops.
        crop_scale: area of the random crop as a fraction of the image, least and most.
        flip: mirror half of the training images.
        jitter: brightness, contrast and saturation vary by up to this part.
        hue: it turns by up to this part of a whole turn.
        grey: part of the images that lose their colour.
        batch_size: images per step, over all processes together.
        sampler: shuffled, or balanced with images_per_class of each class in a batch.
        images_per_class: of the balanced sampler.
        cache: disk maps the cache from disk, memory reads it into memory, gpu onto the card.
        cache_dir: where the pixel cache lies; default: the user's cache folder.
        bad_images: error stops at unreadable images, skip leaves them out and names them.
    """

    dataset: str = "folder"
    root: str | None = None
    short_side: int | None = None
    crop_size: int | None = None
    crop_scale: tuple[float, float] = (0.08, 1.0)
    flip: bool = True
    jitter: float = 0.0
    hue: float = 0.0
    grey: float = 0.0
    batch_size: int = 180
    sampler: Sampler = "shuffled"
    images_per_class: int = 4
    cache: CachePlace = "disk"
    cache_dir: str | None = None
    bad_images: BadImages = "error"

    def __post_init__(self) -> None:
        check_positive("data", self, "batch_size", "images_per_class", "short_side", "crop_size")
        check_choice("data", self, "sampler", Sampler)
        check_choice("data", self, "cache", CachePlace)
        check_choice("data", self, "bad_images", BadImages)
        try:
            self.colours()
        except ValueError as error:
            raise RecipeError(f"data.{error}") from error
        low, high = self.crop_scale
        require(
            0 < low <= high <= 1,
            f"data.crop_scale must satisfy 0 < least <= most <= 1, got {list(self.crop_scale)}",
        )
        if self.sampler == "balanced":
            require(
                self.batch_size % self.images_per_class == 0,
                f"data.batch_size {self.batch_size} is not a multiple of "
                f"data.images_per_class {self.images_per_class}",
            )

    def colours(self) -> ColourTransform:
        """What happens to the colours of training images."""
        return ColourTransform(self.jitter, self.hue, self.grey)


@dataclass
class Model:
    """The embedder.

    Args:
        backbone: any timm name, bn_inception, sphereface20 or small_convnet.
        dim: width of the embedding.
        keep: numbers of it that are kept, along its principal axes on the training images.
        pooling: avg, max, avg+max, gem, gem-learned, or token for transformers.
        dropout: part of the pooled features that are left out, at random, while training.
        layer_norm: normalise the pooled features, without learned scale (ProxyNCA++).
        normalize: L2-normalise the embedding (ProxyNCA++ does so in the loss alone).
        weights: auto, package, hub, none, or a file.
        image_size: side of the crop; default: the backbone's.
        resize: short side before the central crop in evaluation; default: the backbone's.
        freeze_batchnorm: keep the running statistics of batch normalisation as they are.
        mirror: outside training, mean features of an image and its mirror image; twice the work.
    """

    backbone: str = "tf_efficientnet_lite0"
    dim: int = 512
    keep: int | None = None
    pooling: str = "avg"
    dropout: float = 0.0
    layer_norm: bool = False
    normalize: bool = True
    weights: str = "auto"
    image_size: int | None = None
    resize: int | None = None
    freeze_batchnorm: bool = False
    mirror: bool = False

    def __post_init__(self) -> None:
        check_positive("model", self, "dim", "keep", "image_size", "resize")
        require(
            (self.keep or self.dim) <= self.dim,
            f"model.keep {self.keep} is more than model.dim {self.dim}",
        )
        require(
            0 <= self.dropout < 1,
            f"model.dropout must be at least 0 and below 1, got {self.dropout!r}",
        )


@dataclass
class Loss:
    """The loss and what is added to it.

    Args:
        name: a loss of proximetry.losses, or pairs/<name> for a pair-based one.
        settings: its arguments, such as alpha or proxies_per_class.
        exclusive: weight of RegularFace's term over the proxies.
        center: weight of the centre loss.
        project: put the proxies back on the sphere after each step (RegularFace).
        companions: widths of further heads, which learn beside the embedding and are left behind.
        distill: weight of the term that draws the similarities within a batch to the companions'.
        distill_temperature: what these similarities are divided by; a low one looks at the nearest.
    """

    name: str = "proxy_anchor"
    settings: dict[str, Setting] = field(default_factory=dict)
    exclusive: float = 0.0
    center: float = 0.0
    project: bool = False
    companions: tuple[int, ...] = ()
    distill: float = 0.0
    distill_temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.name.startswith("pairs/") and self.name not in LOSSES:
            raise RecipeError(
                f"loss.name is {self.name!r}{closest(self.name, LOSSES)} Known: {', '.join(LOSSES)}"
            )
        check_not_negative("loss", self, "exclusive", "center", "distill")
        check_positive("loss", self, "distill_temperature")
        require(
            all(width > 0 for width in self.companions),
            f"loss.companions are widths of at least 1, got {list(self.companions)}",
        )
        require(
            not self.distill or bool(self.companions),
            "loss.distill needs companions to learn from, such as loss.companions [1024, 2048]",
        )


OptimizerName = Literal["adamw", "adam", "sgd"]


@dataclass
class Optimizer:
    """The optimiser and the learning rates of the parts.

    Args:
        name: adamw, adam or sgd.
        lr: learning rate of the backbone.
        head_multiplier: the head learns at lr times this.
        proxy_multiplier: the proxies learn at lr times this.
        weight_decay: on all parameters.
        eps: of Adam; ProxyNCA++ uses 1.0, and its learning rates go with it.
        momentum: of SGD.
        clip_value: clip each entry of the gradient of the model and of the proxies.
        clip_norm: clip the norm of the gradient of the model.
    """

    name: OptimizerName = "adamw"
    lr: float = 1e-4
    head_multiplier: float = 1.0
    proxy_multiplier: float = 100.0
    weight_decay: float = 1e-4
    eps: float = 1e-8
    momentum: float = 0.9
    clip_value: float | None = None
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        check_choice("optimizer", self, "name", OptimizerName)
        check_positive("optimizer", self, "lr", "head_multiplier", "proxy_multiplier", "eps")
        check_positive("optimizer", self, "clip_value", "clip_norm")
        check_not_negative("optimizer", self, "weight_decay", "momentum")


ScheduleName = Literal["constant", "step", "milestones", "plateau", "cosine"]


@dataclass
class Schedule:
    """How the learning rates fall.

    Args:
        name: constant, step, milestones, plateau or cosine.
        every: epochs between two falls (step).
        at: epochs of the falls (milestones).
        factor: what a fall multiplies the learning rates by.
        patience: evaluations without a better selection metric before a fall (plateau).
        warmup_epochs: epochs at the start in which the backbone is frozen.
    """

    name: ScheduleName = "step"
    every: int = 10
    at: tuple[int, ...] = ()
    factor: float = 0.5
    patience: int = 4
    warmup_epochs: int = 0

    def __post_init__(self) -> None:
        check_choice("schedule", self, "name", ScheduleName)
        check_positive("schedule", self, "every", "patience")
        check_not_negative("schedule", self, "warmup_epochs")
        require(0 < self.factor <= 1, f"schedule.factor must be in (0, 1], got {self.factor!r}")
        require(
            list(self.at) == sorted(set(self.at)), f"schedule.at must rise, got {list(self.at)}"
        )


Precision = Literal["float32", "bfloat16", "float16"]


@dataclass
class Training:
    """The loop.

    Args:
        epochs: how many, warm-up included.
        seed: of everything random in the run.
        precision: float32, bfloat16 or float16 (autocast; proxies and loss stay in float32).
        accumulate: steps whose embeddings are joined into one update by gradient summing.
        ema: decay of the moving average of the weights; 0 for none.
        compile: compile the backbone with torch.compile.
        capture: on one CUDA device, run the network with fused kernels and as a CUDA graph; as
            fast as compiling or faster, and it starts in seconds. Elsewhere, and with
            accumulate, it does nothing.
        stop_after: stop after so many evaluations without a better selection metric; 0 for never.
        checkpoint_epochs: save every so many epochs, and at the end.
        checkpoint_steps: also save every so many steps; 0 for the ends of epochs alone.
        keep_every: keep the checkpoint of every n-th epoch; 0 for last and best alone.
        two_stages: ProxyNCA++: find epochs and falls on half of the classes, then train on all.
        wandb: project to report to at Weights & Biases, if any.
    """

    epochs: int = 60
    seed: int = 0
    precision: Precision = "float32"
    accumulate: int = 1
    ema: float = 0.0
    compile: bool = False
    capture: bool = False
    stop_after: int = 0
    checkpoint_epochs: int = 1
    checkpoint_steps: int = 0
    keep_every: int = 0
    two_stages: bool = False
    wandb: str | None = None

    def __post_init__(self) -> None:
        check_positive("training", self, "epochs", "accumulate", "checkpoint_epochs")
        check_choice("training", self, "precision", Precision)
        check_not_negative("training", self, "stop_after", "checkpoint_steps", "keep_every", "seed")
        require(0 <= self.ema < 1, f"training.ema must be in [0, 1), got {self.ema!r}")
        require(
            not (self.compile and self.capture),
            "training.compile and training.capture are two ways to the same end: choose one",
        )


Protocol = Literal["held_out", "last", "paper"]


@dataclass
class Evaluation:
    """How the run is judged and which epoch is kept.

    Args:
        protocol: held_out chooses the epoch on training classes left out of training; last takes
            the last epoch; paper chooses the epoch on the test set, as many papers do.
        held_out: fraction of the training classes that are held out.
        every: epochs between two evaluations.
        watch_test: also evaluate the test set each time, for the curve alone: nothing is chosen
            by it.
        metric: what the choice goes by.
        recall_at: the k of recall@k.
        ndcg_at: the k of nDCG@k.
        similarity: cosine or euclidean.
        cuts: also judge the first so many numbers of the embedding, as recall@1[:64] and so on.
        batch_size: images per forward pass.
    """

    protocol: Protocol = "held_out"
    held_out: float = 0.2
    every: int = 1
    watch_test: bool = False
    metric: str = "recall@1"
    recall_at: tuple[int, ...] = (1, 2, 4, 8)
    ndcg_at: tuple[int, ...] = (2, 4, 8)
    similarity: Literal["cosine", "euclidean"] = "cosine"
    cuts: tuple[int, ...] = ()
    batch_size: int = 128

    def __post_init__(self) -> None:
        check_choice("evaluation", self, "protocol", Protocol)
        check_choice("evaluation", self, "similarity", Literal["cosine", "euclidean"])
        check_positive("evaluation", self, "every", "batch_size")
        require(
            0 < self.held_out < 1,
            f"evaluation.held_out must be between 0 and 1, got {self.held_out!r}",
        )


@dataclass
class Recipe:
    """Everything about a run.

    Args:
        name: of the recipe, for people.
        about: one sentence: what it is and where its numbers come from.
    """

    name: str = "unnamed"
    about: str = ""
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    loss: Loss = field(default_factory=Loss)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    training: Training = field(default_factory=Training)
    evaluation: Evaluation = field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        e = self.evaluation
        computed = ["r_precision", "map@r", "mrr"]
        computed += [f"recall@{k}" for k in e.recall_at] + [f"ndcg@{k}" for k in e.ndcg_at]
        computed += [f"{name}[:{cut}]" for cut in e.cuts for name in tuple(computed)]
        require(
            e.metric in computed,
            f"evaluation.metric {e.metric!r} is not computed; choose one of {', '.join(computed)}",
        )
        width = self.model.keep or self.model.dim
        require(
            all(0 < cut < width for cut in e.cuts) and len(set(e.cuts)) == len(e.cuts),
            f"evaluation.cuts must differ and lie between 0 and the embedding's {width}, got "
            f"{list(e.cuts)}",
        )
        if e.protocol == "last":
            require(
                self.schedule.name != "plateau" and not self.training.stop_after,
                "schedule plateau and training.stop_after go by a selection metric, which "
                "evaluation.protocol 'last' does not have; use held_out",
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries and lists, as YAML and JSON hold them."""
        values: dict[str, Any] = plain(asdict(self))
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Recipe":
        """Build from plain dictionaries; keys left out take their defaults, unknown are errors."""
        recipe: Recipe = build(cls, values, "")
        return recipe

    @classmethod
    def load(cls, source: str | Path) -> "Recipe":
        """Read a YAML file, or a shipped recipe by its name."""
        import yaml

        path = find_recipe(source)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise RecipeError(f"{path} is no valid YAML: {error}") from error
        if not isinstance(values, dict):
            raise RecipeError(f"{path} holds no recipe: expected keys such as data, model, loss")
        try:
            return cls.from_dict(values)
        except RecipeError as error:
            raise RecipeError(f"{path}: {error}") from error

    def save(self, path: Path) -> None:
        """Write YAML that `load` reads back to an equal recipe."""
        import yaml

        text = yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True)
        atomic_write(path, text.encode())


SHIPPED = Path(__file__).parents[1] / "recipes"


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe given by its path or by the name of a shipped one."""
    path = Path(source)
    if path.is_file():
        return path
    known = shipped_recipes()
    if str(source) in known:
        return known[str(source)]
    hint = closest(str(source), known)
    raise RecipeError(
        f"no recipe {str(source)!r}{hint} `proximetry recipes` lists the shipped ones"
    )
