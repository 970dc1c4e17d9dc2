"""The keys of a recipe: type, default, limits and help of each, declared once.

The YAML reader, the options of `proximetry train` and docs/recipe_keys.md are generated from them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.fields import FieldInfo

from proximetry._util.errors import suggest
from proximetry._util.files import atomic_write
from proximetry._util.formatting import format_value, join_first, parse_seconds, shorten
from proximetry.data import FIELDS
from proximetry.data.datasets import list_datasets
from proximetry.data.folders import check_name_rule
from proximetry.metrics.scores import COUNTS, Metrics
from proximetry.models.constants import (
    CUSTOM,
    MAX_BATCH_SIZE,
    MAX_BITS,
    MAX_DIM,
    MAX_SIDE,
    MAX_TTA_CROPS,
    POOLINGS,
    VECTOR_BACKBONES,
    WEIGHTS_SOURCES,
    Similarity,
)
from proximetry.recipe.loading import (
    DEFAULTS,
    REMOVED,
    RecipeError,
    flatten,
    merge,
    plain_values,
    validation_message,
)


def _check_text(text: str) -> str:
    """Reject text that cannot be a name or a path."""
    if not text.strip():
        raise ValueError(f"must not be empty, got {text!r}")
    try:
        if b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise ValueError(f"contains invalid characters, got {format_value(text)}")


def _check_duration(text: str) -> str:
    parse_seconds(text)
    return text


def _or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if value == AUTO else check(value)


CLASS_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")  # module:Class
AUTO: Any = "auto"  # of any type, since it stands for numbers and flags too
EMA = "ema"  # of loss.teacher

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True, le=10**9)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[Integer, Field(ge=1)]
Side = Annotated[Count, Field(le=MAX_SIDE)]
Dim = Annotated[Count, Field(le=MAX_DIM)]
Bits = Annotated[Count, Field(multiple_of=8, le=MAX_BITS)]
Setting = bool | Integer | Number | str
Text = Annotated[str, AfterValidator(_check_text)]
Duration = Annotated[str, AfterValidator(_check_duration)]
UserPath = Annotated[Text, AfterValidator(os.path.expanduser)]
AbsolutePath = Annotated[UserPath, AfterValidator(os.path.abspath)]
# These may be "auto" until `auto.choose` sets a value.
AutoCount = Annotated[Count, WrapValidator(_or_auto)]
AutoInteger = Annotated[Annotated[Integer, Field(ge=0)], WrapValidator(_or_auto)]
AutoFlag = Annotated[Flag, WrapValidator(_or_auto)]
Protocol = Literal["held_out", "last", "paper"]

# Roles of keys that do not change the result of a step.
Role = Literal["metadata", "path", "runtime", "duration"]


def _key(default: Any, about: str, role: Role | None = None, **limits: Any) -> Any:
    """Declare a key: its default, its help, its role and its limits."""
    return Field(default, description=about, json_schema_extra={"role": role}, **limits)


class Section(BaseModel):
    """A group of keys; immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """Images, augmentation and batches."""

    dataset: str = _key("folder", "dataset name; see `proximetry datasets`")
    root: UserPath | None = _key(None, "path of the images; not needed for glyphs", role="path")
    columns: dict[str, Text] = _key(
        {}, "names of table columns, if different: path=file,label=category"
    )
    labels_from_name: Text | None = _key(
        None,
        "read classes from file names instead of folders: auto (boxer from boxer_12.jpg), or a "
        "regular expression whose first group is the class",
    )
    suggestions: AbsolutePath | None = _key(
        None,
        "apply the suggestions of a CSV file, which `proximetry check` and the search page write: "
        "drop, relabel or move images",
        role="path",
    )
    max_images_per_class: Count | None = _key(
        None, "maximum number of training images per class; the same random choice for every seed"
    )
    label_noise: Number = _key(
        0.0,
        "fraction of the training images that get a random other class, the same for every seed; "
        "for experiments on robustness",
        ge=0,
        le=1,
    )
    short_side: Side | None = _key(
        None, "short side of the images in the pixel cache; null uses model.resize"
    )
    crop_size: Side | None = _key(None, "size of training crops; null uses model.image_size")
    crop_scale: tuple[Number, Number] = _key(
        (0.08, 1.0), "area range of random resized crops, as fractions of the image"
    )
    crop_ratio: tuple[Number, Number] = _key(
        (0.75, 4 / 3), "aspect-ratio range of random resized crops"
    )
    random_crop: Flag = _key(
        True, "random resized crops; false for center crops, as is usual for aligned faces"
    )
    flip: Flag = _key(True, "random horizontal flips")
    color_jitter: Number = _key(
        0.0, "brightness, contrast and saturation jitter, as in ColorJitter", ge=0, le=1
    )
    hue: Number = _key(0.0, "hue jitter, as in ColorJitter", ge=0, le=0.5)
    grayscale: Number = _key(0.0, "probability of converting an image to grayscale", ge=0, le=1)
    batch_size: Count = _key(180, "global batch size, over all processes", le=10**6)
    sampler: Literal["shuffled", "balanced", "streamed"] = _key(
        "shuffled",
        "balanced: images_per_class images per class in each batch; streamed: shuffle within a "
        "buffer, for large tar shards",
    )
    shuffle_buffer: Count = _key(16384, "size of the shuffle buffer in images (streamed)", le=10**7)
    images_per_class: Count = _key(4, "images per class in a batch (balanced)")
    cache: Literal["auto", "none", "pixels", "gpu"] = _key(
        AUTO,
        "none: decode images on the fly; pixels: decode once and cache on disk; gpu: also copy to "
        "GPU memory; auto: choose by available space",
        role="runtime",
    )
    cache_dir: UserPath | None = _key(
        None, "folder of the pixel cache; null uses the user's cache folder", role="path"
    )
    bad_images: Literal["error", "skip"] = _key(
        "error", "missing or unreadable images: raise an error, or skip and list them"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        names, (low, high), (narrow, wide) = list_datasets(), self.crop_scale, self.crop_ratio
        if self.dataset not in names and not self.dataset.startswith(CUSTOM):
            raise ValueError(
                f"dataset is {format_value(self.dataset)}{suggest(self.dataset, names)}"
            )
        for name in self.columns:
            if name not in FIELDS:
                raise ValueError(f"columns has no {format_value(name)}{suggest(name, FIELDS)}")
        if self.labels_from_name is not None:
            check_name_rule(self.labels_from_name)
        if not 0 < low <= high <= 1:
            raise ValueError(f"crop_scale must be increasing within 0 and 1, got {[low, high]}")
        if not 0 < narrow <= wide:
            raise ValueError(f"crop_ratio must be positive and increasing, got {[narrow, wide]}")
        if self.sampler == "balanced" and self.batch_size % self.images_per_class:
            each = f"images_per_class {self.images_per_class}"
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of {each}")
        return self


class ModelConfig(Section):
    """The embedder."""

    backbone: Text = _key(
        "tf_efficientnet_lite0",
        "backbone name; see `proximetry backbones`. For vectors instead of images: vectors (a "
        "linear head) or vectors_mlp (a small MLP before it)",
    )
    dim: Dim = _key(DEFAULTS["model.dim"], "embedding dimension; equal to bits, if set")
    bits: Bits | None = _key(
        None, "train binary codes of this length: signs of the embedding minus its training mean"
    )
    pca_dim: Dim | None = _key(
        None, "reduce the embedding to this dimension by PCA, fitted on the training images"
    )
    whitening: Number = _key(
        0.0,
        "with pca_dim: divide each component by this power of its standard deviation; 1 is full "
        "whitening, about 0.25 helps with unseen classes",
        ge=0,
        le=1,
    )
    pooling: Literal[POOLINGS] = _key(  # type: ignore[valid-type]
        "auto",
        "auto: the backbone's own pooling, token for transformers; cls-avg: class token and mean "
        "patch token, concatenated (DINOv2, DINOv3)",
    )
    lora_rank: Count | None = _key(
        None,
        "train LoRA adapters (Hu et al. 2022) of this rank, such as 8 or 16, in the transformer "
        "blocks instead of the backbone itself; merged when saved",
        le=1024,
    )
    lora_alpha: Number | None = _key(
        None, "with lora_rank: the LoRA scale is lora_alpha / lora_rank; null for 1", gt=0
    )
    dropout: Number = _key(0.0, "dropout rate of the pooled features", ge=0, lt=1)
    drop_path: Number = _key(
        0.0, "stochastic depth (Huang et al. 2016): drop rate of the last block", ge=0, lt=1
    )
    layer_norm: Flag = _key(False, "LayerNorm without affine parameters after pooling (ProxyNCA++)")
    normalize: Flag = _key(True, "L2-normalize the embedding")
    weights: Text = _key(
        "auto", f"{', '.join(WEIGHTS_SOURCES)}, a file, or the folder of a run or an embedder"
    )
    image_size: Side | None = _key(
        DEFAULTS["model.image_size"], "input size; null uses the backbone's"
    )
    resize: Side | None = _key(
        None, "short side before the center crop in evaluation; null uses the backbone's"
    )
    squash: Flag | None = _key(
        None,
        "in evaluation, resize both sides, ignoring the aspect ratio; resize then defaults to "
        "image_size; null uses the backbone's",
    )
    freeze_batchnorm: Flag = _key(False, "freeze the running statistics of batch norm")
    freeze_backbone: Flag = _key(
        False, "train the head only, on features computed once without augmentation"
    )
    flip_tta: Flag = _key(
        False, "test-time augmentation: average features over the image and its flip (2x cost)"
    )
    tta_crops: tuple[Annotated[Number, Field(gt=0, lt=1)], ...] = _key(
        (),
        "test-time augmentation: also average features over enlarged center crops of these "
        "fractions, such as 0.875 (one forward pass each)",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("freeze_backbone", "flip_tta", "tta_crops", "drop_path"):
            if self.backbone in VECTOR_BACKBONES and getattr(self, key):
                raise ValueError(f"{key} is for images; backbone {self.backbone} takes vectors")
        frozen, pca, bits = self.freeze_backbone, self.pca_dim, self.bits
        for applies, message in (
            ((pca or 0) > self.dim, f"pca_dim {pca} is more than dim {self.dim}"),
            (self.whitening and not pca, f"whitening {self.whitening} needs pca_dim"),
            (self.lora_alpha and not self.lora_rank, "lora_alpha needs lora_rank"),
            (frozen and self.lora_rank, "freeze_backbone and lora_rank cannot be combined"),
            (frozen and self.drop_path, "freeze_backbone and drop_path cannot be combined"),
            (frozen and self.pooling == "gem-learned", "freeze_backbone needs pooling gem"),
            (bits and self.dim != bits, f"dim {self.dim} and bits {bits} differ"),
            (bits and pca, f"pca_dim {pca} and bits {bits} cannot be combined"),
            (len(self.tta_crops) > MAX_TTA_CROPS, f"tta_crops has more than {MAX_TTA_CROPS}"),
        ):
            if applies:
                raise ValueError(message)
        return self


class LossConfig(Section):
    """The loss and the terms added to it."""

    name: str = _key(
        DEFAULTS["loss.name"],
        "loss name (see `proximetry losses`), or module:Class of a custom loss, called as "
        "loss(embeddings, labels)",
    )
    settings: dict[str, Setting] = _key(
        {},
        "settings of the loss, such as --loss.settings.alpha 32; a custom loss also receives "
        "num_classes and dim if it accepts them",
    )
    exclusive: Number = _key(
        0.0, "weight of RegularFace's exclusive term, ramped up with sphereface's annealing", ge=0
    )
    angular_center: Number = _key(
        0.0, "weight of RegularFace's center loss, 1 − cosine to the class proxy", ge=0
    )
    relational: Number = _key(
        0.0, "weight of relational distillation: similarities in a batch follow a teacher", ge=0
    )
    teacher: Text = _key(
        EMA,
        "teacher of loss.relational: ema, the moving average of training.ema, or an embedder as "
        "for --model",
    )
    nested_dims: tuple[Count, ...] = _key(
        (),
        "also compute the loss on the first d dimensions, for each d, and use the mean, so that "
        "embeddings can be truncated (Matryoshka; Kusupati et al. 2022)",
    )
    proxy_momentum: Number | None = _key(
        None,
        "update the proxies by a running mean of the embeddings of their class with this momentum, "
        "such as 0.9, instead of by gradient",
        ge=0,
        lt=1,
    )
    optimization: Literal["normalized", "projected"] = _key(
        "normalized",
        "normalized: normalize proxies in the forward pass; projected: project them onto the unit "
        "sphere after each step (Zhao et al. 2019)",
    )
    sharded: Flag = _key(
        False, "shard the proxies by class across processes, for very many classes"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        import torch

        from proximetry.losses import check_settings, create, loss_settings

        for key in ("exclusive", "angular_center", "relational", "proxy_momentum"):
            if self.sharded and getattr(self, key) not in (0.0, None):
                raise ValueError(f"{key} and sharded cannot be combined")
        if self.exclusive and self.proxy_momentum is not None:
            raise ValueError("exclusive needs proxies with a gradient, not proxy_momentum")
        if self.name.startswith(CUSTOM) or CLASS_PATH.fullmatch(self.name):
            return self
        where = "name: "
        try:
            loss_settings(self.name)
            where = "settings: "
            check_settings(self.name, self.settings)
            if self.settings.get("synthesis"):
                with torch.device("meta"):  # draws no random numbers
                    create(self.name, 2, 2, **self.settings).check_synthesis()
                if self.sharded:
                    raise ValueError("synthesis and sharded cannot be combined")
        except ValueError as error:
            reason = shorten(str(error), 500)
            where = "settings." if reason.split(maxsplit=1)[0] in self.settings else where
            raise ValueError(where + reason) from error
        return self


class OptimizerConfig(Section):
    """The optimizer and the learning rates."""

    name: Literal["adamw", "adam", "sgd"] = _key("adamw", "optimizer")
    lr: Number = _key(1e-4, "learning rate of the backbone", gt=0)
    layer_decay: Number = _key(
        1.0,
        "layer-wise learning-rate decay from the last backbone layer to the first; 1 disables it, "
        "about 0.75 suits transformers",
        gt=0,
        le=1,
    )
    head_multiplier: Number = _key(1.0, "learning rate of the head, as a multiple of lr", gt=0)
    proxy_multiplier: Number = _key(
        100.0, "learning rate of the proxies, as a multiple of lr", gt=0
    )
    weight_decay: Number = _key(1e-4, "weight decay of all parameters", ge=0)
    # Less than the minimum is zero in float32.
    eps: Number = _key(1e-8, "epsilon of Adam; ProxyNCA++ uses 1.0 with a matching lr", ge=1e-30)
    momentum: Number = _key(0.9, "momentum of SGD", ge=0, lt=1)
    clip_value: Number | None = _key(None, "gradient clipping by value", gt=0)
    clip_norm: Number | None = _key(None, "gradient clipping by norm, for the network", gt=0)


class ScheduleConfig(Section):
    """The learning-rate schedule."""

    name: Literal["constant", "step", "milestones", "plateau", "cosine"] = _key(
        "step", "learning-rate schedule"
    )
    every: AutoCount = _key(10, "epochs between drops (step); auto: a third of the epochs")
    at: tuple[Count, ...] = _key((), "epochs of the drops (milestones)")
    factor: Number = _key(0.5, "learning-rate factor at a drop", gt=0, le=1)
    patience: Count = _key(4, "evaluations without improvement before a drop (plateau)")
    warmup_steps: Integer = _key(0, "steps of linear learning-rate warm-up", ge=0)
    freeze_backbone_epochs: Integer = _key(
        0, "initial epochs that train only the head and the proxies", ge=0
    )


class TrainingConfig(Section):
    """The training loop."""

    epochs: AutoInteger = _key(
        60,
        "number of epochs, 0 to train nothing; auto chooses by the number of training images",
        role="duration",
    )
    max_steps: Count | None = _key(
        None,
        "maximum number of steps; training and a cosine schedule may end within an epoch",
        role="duration",
    )
    max_time: Duration | None = _key(
        None,
        "maximum duration including the final evaluation, such as 10m or 2h; the schedule still "
        "spans all epochs",
        role="duration",
    )
    seed: Annotated[int, Field(strict=True)] = _key(0, "random seed of the run", ge=0, lt=2**63)
    precision: Literal["auto", "float32", "bfloat16", "float16"] = _key(
        AUTO,
        "autocast precision of the network; proxies and loss use float32. auto: bfloat16 if the "
        "GPU supports it, else float32",
    )
    accumulate: Count = _key(
        1,
        "chunks per batch (gradient caching): the exact gradient of the whole batch in less "
        "memory; batch norm sees one chunk at a time unless frozen",
    )
    ema: Number = _key(0.0, "EMA decay; the averaged weights are evaluated and saved", ge=0, lt=1)
    cuda_graph: AutoFlag = _key(
        AUTO,
        "run the network as a CUDA graph with fused kernels; needs CUDA, one process and "
        "accumulate 1, else ignored. auto: if Triton is installed",
    )
    stop_after: Integer = _key(
        0, "early-stopping patience in evaluations; 0 disables it", role="duration", ge=0
    )
    checkpoint_epochs: AutoCount = _key(
        AUTO,
        "epochs between checkpoints; selected epochs are always saved. auto: every epoch, on a "
        "CUDA GPU at most every 20 000 training images",
        role="runtime",
    )
    checkpoint_steps: Integer = _key(
        0, "also save a checkpoint every n steps; 0 disables it", role="runtime", ge=0
    )
    keep_checkpoint_every: Integer = _key(
        0, "keep the checkpoint of every n-th epoch; 0 keeps last and best", role="runtime", ge=0
    )
    two_stages: Flag = _key(
        False,
        "select the number of epochs and the learning-rate drops on half of the classes, then "
        "train on all (Teh et al. 2020)",
    )
    tracker: Literal["none", "tensorboard", "wandb", "mlflow"] = _key(
        "tensorboard",
        "experiment tracker: TensorBoard (if installed), Weights & Biases or MLflow; a resumed "
        "run continues its log",
        role="runtime",
    )
    project: Text | None = _key(
        None,
        "Weights & Biases project or MLflow experiment; null for proximetry",
        role="runtime",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        for key in ("max_steps", "max_time"):
            if self.two_stages and getattr(self, key) is not None:
                raise ValueError(f"{key} and two_stages cannot be combined")
        return self

    def duration(self) -> list[Any]:
        """Return the limits of the run, which can be extended."""
        return [self.epochs, self.max_steps, self.max_time]

    def total_steps(self, steps_per_epoch: int) -> int:
        """Return the number of steps of a run that does not end early."""
        steps: int = self.epochs * steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def is_over(self, epochs: int, stale: int) -> bool:
        """Return whether a run ends after these epochs and evaluations without improvement."""
        return epochs >= self.epochs or 0 < self.stop_after <= stale


class EvaluationConfig(Section):
    """How the run is evaluated and which epoch is saved."""

    protocol: Protocol = _key(
        "held_out",
        "epoch selection: held_out selects on held-out training classes, paper on the test set, as "
        "many papers do; last takes the last epoch",
    )
    held_out: Number = _key(
        0.2, "fraction of training classes to hold out, at least three classes", gt=0, lt=1
    )
    every: AutoCount = _key(
        1,
        "epochs between evaluations; auto: a tenth of the epochs, also the minimum if there is no "
        "split to evaluate during training",
    )
    watch_test: Flag = _key(
        False,
        "also evaluate the test set during training; does not affect epoch selection",
        role="runtime",
    )
    final_test: Flag = _key(True, "evaluate the test set at the end of the run", role="runtime")
    untrained: Flag = _key(True, "evaluate the untrained embedder as a baseline", role="runtime")
    select_by: str = _key("map@r", "metric that selects the epoch; ties select the later epoch")
    metrics: Metrics = _key(Metrics(), "metrics to compute")
    similarity: Similarity = _key("cosine", "similarity of embeddings")
    eval_dims: tuple[Count, ...] = _key(
        (), "also evaluate the first d dimensions of the embedding, for each d"
    )
    batch_size: Count = _key(128, "images per forward pass", role="runtime", le=MAX_BATCH_SIZE)


class Recipe(Section):
    """All settings of a run except its output folder."""

    name: Text = _key("unnamed", "name of the recipe", role="metadata")
    about: str = _key("", "description and source of the settings", role="metadata")
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        evaluation, at = self.evaluation, self.schedule.at
        dims, width = evaluation.eval_dims, self.model.pca_dim or self.model.dim
        computed = [name for name in evaluation.metrics.names() if name not in COUNTS]
        if evaluation.select_by not in computed:
            raise ValueError(
                f"evaluation.select_by {format_value(evaluation.select_by)} is not computed; "
                f"choose one of {join_first(computed, 12)}"
            )
        if self.loss.relational and self.loss.teacher == EMA and not self.training.ema:
            raise ValueError(
                "loss.relational needs training.ema above 0, such as 0.99, or a loss.teacher"
            )
        if self.loss.sharded and self.training.precision == "float16":
            # The gradient scaler could skip a step on one process only.
            raise ValueError("training.precision must not be float16 with loss.sharded")
        nested = self.loss.nested_dims
        if nested and self.model.pca_dim:
            raise ValueError("loss.nested_dims and model.pca_dim cannot be combined")
        if any(dim >= self.model.dim for dim in nested) or len(set(nested)) < len(nested):
            raise ValueError(
                f"loss.nested_dims must be distinct and below {self.model.dim}, got "
                f"{format_value(list(nested))}"
            )
        if list(at) != sorted(set(at)):
            raise ValueError(f"schedule.at must be increasing, got {format_value(list(at))}")
        if any(dim >= width for dim in dims) or len(set(dims)) < len(dims):
            raise ValueError(
                f"evaluation.eval_dims must be distinct and below {width}, got "
                f"{format_value(list(dims))}"
            )
        if self.model.bits is not None and dims:
            raise ValueError("evaluation.eval_dims and model.bits cannot be combined")
        if self.model.bits is not None and evaluation.similarity != "cosine":
            raise ValueError("evaluation.similarity must be cosine with model.bits")
        if evaluation.protocol == "last" and self.schedule.name == "plateau":
            raise ValueError(
                "schedule.name plateau needs a selection metric, which evaluation.protocol last "
                "lacks; choose another schedule.name, such as step"
            )
        return self

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> Recipe:
        """Load a recipe from a YAML file, a shipped recipe's name or plain values, with overrides.

        Missing keys take the value of the recipe named as ``base``, else their default. Keys may be
        nested or dotted: ``{"optimizer.lr": 1e-3}``.

        Raises:
            RecipeError: unknown keys, or invalid values.

        Examples:
            >>> recipe = Recipe.load("default-cpu", {"training.epochs": 10, "model.dim": 256})
            >>> recipe.training.epochs, recipe.model.dim, recipe.loss.name
            (10, 256, 'proxy_anchor')
        """
        try:
            values = merge(plain_values(source), overrides or {})
            for key, value in REMOVED.items():
                section, _, name = key.partition(".")
                keys = values.get(section)
                if isinstance(keys, dict) and name in keys and keys[name] == value:
                    del keys[name]
            return cls.model_validate(values)
        except ValidationError as error:
            where = "" if overrides or isinstance(source, Mapping) else f"{source}: "
            raise RecipeError(where + validation_message(error, cls)) from None

    def override(self, changes: Mapping[str, Any]) -> Recipe:
        """Return this recipe with changes, by nested or dotted keys, validated again."""
        unchanged = self.model_dump(mode="json", exclude_unset=True, warnings=False)
        return Recipe.load(unchanged, changes)

    def evaluation_interval(self, watched: bool) -> int:
        """Return the epochs between two evaluations: more without ``watched`` splits."""
        return max(self.evaluation.every, 1 if watched else self.training.epochs // 10)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, as in YAML and JSON."""
        return self.model_dump(mode="json", warnings=False)

    def keys_without_roles(
        self, *, without: tuple[Role, ...] = ("metadata", "path")
    ) -> dict[str, Any]:
        """Return the flat keys and values, without keys of these roles."""
        excluded = _keys_of_roles(without)
        return {k: value for k, value in flatten(self.to_dict()).items() if k not in excluded}

    def computation_keys(self) -> dict[str, Any]:
        """Return the flat keys and values that change what a step computes: those without a role.

        A run can only be resumed with the same ones.
        """
        return {
            **self.keys_without_roles(without=get_args(Role)),
            **self._names_of_files(),
        }

    def without_paths(self) -> Recipe:
        """Return the recipe without local paths."""
        paths = dict.fromkeys(_keys_of_roles(("path",)))
        return self.override({**paths, **self._names_of_files()})

    def _names_of_files(self) -> dict[str, str]:
        """Return the sources of the weights and of the teacher; for a file, only its name."""
        sources = {"model.weights": self.model.weights, "loss.teacher": self.loss.teacher}
        return {
            key: value if value in (*WEIGHTS_SOURCES, EMA) else Path(value).name or "file"
            for key, value in sources.items()
        }

    def to_yaml(self) -> str:
        """Return YAML that `load` reads back to an equal recipe."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    def save(self, path: Path) -> None:
        """Write the YAML file."""
        atomic_write(path, self.to_yaml().encode())


def recipe_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Yield every dotted key of a recipe with its declaration, in order."""
    for name, field in Recipe.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            for key, inner in kind.model_fields.items():
                yield f"{name}.{key}", inner
        else:
            yield name, field


def _keys_of_roles(roles: tuple[Role, ...]) -> set[str]:
    extras: dict[str, Any] = {key: field.json_schema_extra for key, field in recipe_keys()}
    return {key for key, extra in extras.items() if extra["role"] in roles}
