"""The recipe of a run: typed, validated once, one to one with YAML and with the command line.

A key is declared once, with its type, default, limits and help; the YAML reader, `proximetry
train --help` and the reference in docs/ follow from the declaration. `Recipe.load` makes a recipe
and `Recipe.override` changes one; there is no other way to do either.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from proximetry._util.errors import UsageError, closest, shorten, shown, some
from proximetry._util.files import atomic_write, read_text
from proximetry.data.datasets import list_datasets
from proximetry.data.registry import FIELDS
from proximetry.metrics.scores import COUNTS, Metrics
from proximetry.models.names import (
    LARGEST_BATCH,
    LARGEST_BITS,
    LARGEST_DIM,
    LARGEST_SIDE,
    MOST_TTA_CROPS,
    OWN,
    POOLINGS,
    VECTOR_BACKBONES,
    WEIGHTS_SOURCES,
    Similarity,
)

SHIPPED = Path(__file__).parent / "recipes"


# Files of people are far smaller and flatter; what is beyond that is a mistake, or made to do harm.
_LARGEST_FILE = 100_000
_DEEPEST = 20
_MOST_VALUES = 10_000
_MOST_BRACKETS = 100  # in a line, where the time to read them grows with their square
_LARGEST_NUMBER = 10**9


class RecipeError(UsageError):
    """A recipe that cannot be used, and why."""


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {value!r}")
    return value


def _of_use(value: Any) -> Any:
    if isinstance(value, int | float) and abs(value) > _LARGEST_NUMBER:
        raise ValueError(f"must be at most {_LARGEST_NUMBER:g}, got {shown(value)}")
    return value


def _number_if_it_is_one(value: Any) -> Any:
    with suppress(ValueError):
        value = float(value) if isinstance(value, str) else value
    return value


def _writable(text: str) -> str:
    """Refuse what cannot be the name of anything."""
    if not text.strip():
        raise ValueError(f"must not be empty, got {text!r}")
    try:
        if b"\0" not in os.fsencode(text):
            return text
    except UnicodeEncodeError:
        pass
    raise ValueError(f"holds characters that are no text, got {shown(text)}")


# YAML reads 1e-4 as text, so numbers may be text; truth values are no numbers. The limits are far
# beyond what is of use: they keep what was mistyped from failing late, or from eating the memory.
Number = Annotated[
    float, BeforeValidator(_no_bool), Field(allow_inf_nan=False), AfterValidator(_of_use)
]
Whole = Annotated[int, Field(strict=True), AfterValidator(_of_use)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[Whole, Field(ge=1)]
Side = Annotated[Count, Field(le=LARGEST_SIDE)]
Dim = Annotated[Count, Field(le=LARGEST_DIM)]
Bits = Annotated[Count, Field(multiple_of=8, le=LARGEST_BITS)]
Setting = Annotated[
    bool | int | float | str, BeforeValidator(_number_if_it_is_one), AfterValidator(_of_use)
]
Text = Annotated[str, AfterValidator(_writable)]


def _or_auto(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return value if value == AUTO else check(value)


AUTO: Any = "auto"  # of any type, since it stands for numbers and flags too
# Such a key may also be "auto" until `automatic.choose` puts a value in its place, which is before
# anything computes with it.
OrAuto = (WrapValidator(_or_auto), PlainSerializer(lambda value: value, return_type=Any))
AutoCount = Annotated[Count, *OrAuto]
AutoFlag = Annotated[Flag, *OrAuto]
Protocol = Literal["held_out", "last", "paper"]

# What a key is about, where that matters to those who compare recipes.
Role = Literal["words", "place", "pace", "end"]


def _key(default: Any, about: str, role: Role | None = None, **limits: Any) -> Any:
    """Declare a key: its default, its help and its limits.

    A key with a role does not change what a step computes: ``words`` are for people, a ``place``
    is where something lies on this machine, ``pace`` is about speed, safety and reporting, and
    ``end`` says when the run is over.
    """
    return Field(default, description=about, json_schema_extra={"role": role}, **limits)


class Section(BaseModel):
    """Keys that belong together; unknown ones are errors, and values do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(Section):
    """Which images, and how they become batches."""

    dataset: str = _key("folder", "a dataset that `proximetry datasets` lists")
    root: Text | None = _key(None, "where the images lie; glyphs need none", role="place")
    columns: dict[str, Text] = _key(
        {},
        "what a table calls its columns where these have other names: path=file,label=category",
    )
    short_side: Side | None = _key(
        None, "short side of the images in the pixel cache; null takes model.resize"
    )
    crop_size: Side | None = _key(
        None,
        "side of the training crops; null takes model.image_size. Smaller crops than in evaluation "
        "make up for objects looking larger in random crops",
    )
    crop_scale: tuple[Number, Number] = _key(
        (0.08, 1.0), "smallest and largest area of the random resized crop, as a fraction"
    )
    crop_ratio: tuple[Number, Number] = _key(
        (0.75, 4 / 3),
        "smallest and largest width over height of the random resized crop, before it is scaled to "
        "a square; wider ones for objects that are wide",
    )
    random_crop: Flag = _key(
        True,
        "false trains on the centre crops of evaluation, as is usual for aligned faces",
    )
    flip: Flag = _key(True, "flip half of the training images horizontally")
    color_jitter: Number = _key(
        0.0, "strength of random brightness, contrast and saturation, as in ColorJitter", ge=0, le=1
    )
    hue: Number = _key(0.0, "largest random hue shift, as in ColorJitter", ge=0, le=0.5)
    grayscale: Number = _key(0.0, "probability that an image loses its color", ge=0, le=1)
    batch_size: Count = _key(180, "images per step, over all processes together", le=10**6)
    sampler: Literal["shuffled", "balanced", "streamed"] = _key(
        "shuffled",
        "balanced draws images_per_class images of each class in a batch; streamed takes images "
        "that lie side by side at about the same time, for large tar shards",
    )
    shuffle_buffer: Count = _key(
        16384, "images that the streamed sampler shuffles together", le=10**7
    )
    images_per_class: Count = _key(4, "of the balanced sampler")
    cache: Literal["auto", "none", "encoded", "pixels", "gpu"] = _key(
        AUTO,
        "none decodes the image files on the fly; pixels are decoded once and kept on disk, with "
        "gpu also in its memory; encoded keeps images compressed again at short_side, which "
        "changes them slightly; auto goes by what fits where",
        role="pace",
    )
    cache_dir: Text | None = _key(
        None, "folder of the pixel cache; null takes the user's cache folder", role="place"
    )
    bad_images: Literal["error", "skip"] = _key(
        "error", "stop at missing or unreadable images, or leave them out and list them"
    )

    @field_validator("root", "cache_dir")
    @classmethod
    def _expand_home(cls, path: str | None) -> str | None:
        return None if path is None else str(Path(path).expanduser())

    @field_validator("columns")
    @classmethod
    def _known_columns(cls, columns: dict[str, str]) -> dict[str, str]:
        for name in columns:
            if name not in FIELDS:
                raise ValueError(f"has no {shown(name)}{closest(name, FIELDS)}")
        return columns

    @field_validator("dataset")
    @classmethod
    def _known_dataset(cls, name: str) -> str:
        known = list_datasets()
        if name not in known and not name.startswith(OWN):
            raise ValueError(f"is {shown(name)}{closest(name, known)}")
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        low, high = self.crop_scale
        if not 0 < low <= high <= 1:
            raise ValueError(
                f"crop_scale must satisfy 0 < smallest <= largest <= 1, got {[low, high]}"
            )
        narrow, wide = self.crop_ratio
        if not 0 < narrow <= wide:
            raise ValueError(
                f"crop_ratio must satisfy 0 < smallest <= largest, got {[narrow, wide]}"
            )
        if self.sampler == "balanced" and self.batch_size % self.images_per_class:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of "
                f"images_per_class {self.images_per_class}"
            )
        return self


class ModelConfig(Section):
    """The embedder."""

    backbone: Text = _key(
        "tf_efficientnet_lite0",
        "a model that `proximetry backbones` lists; for vectors instead of images vectors (a "
        "linear head) or vectors_mlp (a small MLP before it)",
    )
    dim: Dim = _key(512, "dimension of the embedding; with bits, their number")
    bits: Bits | None = _key(
        None,
        "binary codes of 64, 128, 256 or another multiple of 8 bits, to be searched by Hamming "
        "distance: the sign of each dimension about the mean of the training images (folded into "
        "the head)",
    )
    pca_dim: Dim | None = _key(
        None,
        "reduce the trained embedding to this dimension with PCA fitted on the training images "
        "(folded into the head)",
    )
    whitening: Number = _key(
        0.0,
        "with pca_dim: divide each principal component by this power of its standard deviation; 1 "
        "whitens, about 0.25 helps to tell unseen classes apart",
        ge=0,
        le=1,
    )
    pooling: Literal[POOLINGS] = _key(  # type: ignore[valid-type]
        "auto",
        "auto is the network's own: the input of its classifier, pre-logits, and token for "
        "transformers; cls-avg is the class token of these beside the mean of the patch tokens "
        "(DINOv2, DINOv3)",
    )
    lora_rank: Count | None = _key(
        None,
        "train low-rank updates (LoRA, Hu et al. 2022) of the linear layers in the blocks of a "
        "transformer instead of the backbone itself: of this rank, such as 8 or 16. They are "
        "merged into the weights that are saved",
        le=1024,
    )
    lora_alpha: Number | None = _key(
        None,
        "with lora_rank: scales the updates by lora_alpha / lora_rank; null by 1",
        gt=0,
    )
    dropout: Number = _key(0.0, "probability of dropping a pooled feature in training", ge=0, lt=1)
    drop_path: Number = _key(
        0.0,
        "stochastic depth (Huang et al. 2016): probability of dropping the last block of a network "
        "of timm in training, less for the blocks before it",
        ge=0,
        lt=1,
    )
    layer_norm: Flag = _key(
        False, "LayerNorm without learned scale after pooling (Teh et al. 2020)"
    )
    normalize: Flag = _key(True, "L2-normalise the embedding")
    weights: Text = _key(
        "auto", f"{', '.join(WEIGHTS_SOURCES)}, a file, or the folder of a run or an embedder"
    )
    image_size: Side | None = _key(None, "side of the crop; null takes the backbone's")
    resize: Side | None = _key(
        None, "short side before the centre crop in evaluation; null takes the backbone's"
    )
    squash: Flag | None = _key(
        None,
        "scale both sides of an image to resize in evaluation, whatever its shape; resize is then "
        "image_size unless given, and the whole of a wide image is seen; null takes the backbone's",
    )
    freeze_batchnorm: Flag = _key(
        False, "keep the running statistics of batch normalisation as they are"
    )
    freeze_backbone: Flag = _key(
        False,
        "train the head alone, on features of the backbone that are computed once, without "
        "augmentation, and kept in memory",
    )
    flip_tta: Flag = _key(
        False,
        "test-time augmentation: average the features of the image and its horizontal flip "
        "(2x cost)",
    )
    tta_crops: tuple[Annotated[Number, Field(gt=0, lt=1)], ...] = _key(
        (),
        "test-time augmentation: also average the features of the centre of the crop, such shares "
        "of its sides as 0.875, enlarged to its size (a forward pass each)",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_bit_per_dimension(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "dim" in values:
            return values
        bits = values.get("bits")
        known = type(bits) is int and 1 <= bits <= LARGEST_BITS  # else it is refused by its name
        return {**values, "dim": bits} if known else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.pca_dim or self.dim) > self.dim:
            raise ValueError(f"pca_dim {self.pca_dim} is more than dim {self.dim}")
        if self.whitening and self.pca_dim is None:
            raise ValueError(f"whitening {self.whitening:g} goes with pca_dim: give both")
        if len(self.tta_crops) > MOST_TTA_CROPS:
            raise ValueError(
                f"tta_crops has {len(self.tta_crops)} crops, each a forward pass: at most "
                f"{MOST_TTA_CROPS}"
            )
        if self.lora_alpha is not None and self.lora_rank is None:
            raise ValueError(f"lora_alpha {self.lora_alpha:g} goes with lora_rank: give both")
        if self.freeze_backbone and self.lora_rank is not None:
            raise ValueError(
                f"freeze_backbone and lora_rank {self.lora_rank} exclude each other: LoRA trains "
                "the backbone; leave one of them out"
            )
        if self.freeze_backbone and self.pooling == "gem-learned":
            raise ValueError(
                "freeze_backbone keeps pooled features, but pooling gem-learned learns; use gem"
            )
        if self.freeze_backbone and self.drop_path:
            raise ValueError(
                f"freeze_backbone and drop_path {self.drop_path:g} exclude each other: features "
                "are computed once, by all blocks; leave one of them out"
            )
        for key in ("freeze_backbone", "flip_tta", "tta_crops", "drop_path"):
            if self.backbone in VECTOR_BACKBONES and getattr(self, key):
                raise ValueError(f"{key} is for images; backbone {self.backbone} takes vectors")
        if self.bits is not None and self.dim != self.bits:
            raise ValueError(
                f"dim {self.dim} and bits {self.bits} disagree: a code has one bit for each "
                "dimension; leave dim out"
            )
        if self.bits is not None and self.pca_dim is not None:
            raise ValueError(
                f"pca_dim {self.pca_dim} and bits {self.bits} exclude each other: PCA makes other "
                "dimensions than those whose signs are trained; leave one of them out"
            )
        return self


class LossConfig(Section):
    """The loss and the terms added to it."""

    name: str = _key("proxy_anchor", "a loss that `proximetry losses` lists")
    settings: dict[str, Setting] = _key(
        {}, "its settings; on the command line such as --loss.settings.alpha 32"
    )
    exclusive: Number = _key(
        0.0,
        "weight of RegularFace's exclusive term; with sphereface it grows as the annealing falls",
        ge=0,
    )
    center: Number = _key(0.0, "weight of the center loss (Wen et al. 2016)", ge=0)
    angular_center: Number = _key(
        0.0, "weight of RegularFace's center loss, one minus the cosine to the own proxy", ge=0
    )
    quantization: Number = _key(
        0.0,
        "with model.bits: weight of the term that draws embeddings to their binary codes (Li et "
        "al. 2016)",
        ge=0,
    )
    optimization: Literal["normalized", "projected"] = _key(
        "normalized",
        "how proxies keep to the unit sphere: normalized in the forward pass, their length free; "
        "or projected gradient, put back on the sphere after each step (Zhao et al. 2019)",
    )

    @field_validator("name")
    @classmethod
    def _known_loss(cls, name: str) -> str:
        from proximetry.losses import loss_settings  # imports torch, which help does not need

        if not name.startswith(OWN):
            loss_settings(name)
        return name

    @model_validator(mode="after")
    def _check(self) -> Self:
        from proximetry.losses import check_settings

        if self.name.startswith(OWN):
            return self
        try:
            check_settings(self.name, self.settings)
        except ValueError as error:
            reason = shorten(str(error), 500)
            named = reason.split(maxsplit=1)[0] in self.settings
            raise ValueError(f"settings{'.' if named else ': '}{reason}") from error
        return self


class OptimizerConfig(Section):
    """The optimiser and the learning rates."""

    name: Literal["adamw", "adam", "sgd"] = _key("adamw", "the optimiser")
    lr: Number = _key(1e-4, "learning rate of the backbone", gt=0)
    layer_decay: Number = _key(
        1.0,
        "each layer of the backbone learns at this times the rate of the layer after it, the last "
        "one at lr (layer-wise learning-rate decay); 1 for one rate, about 0.75 for transformers",
        gt=0,
        le=1,
    )
    head_multiplier: Number = _key(1.0, "the head learns at lr times this", gt=0)
    proxy_multiplier: Number = _key(100.0, "the proxies learn at lr times this", gt=0)
    weight_decay: Number = _key(1e-4, "on all parameters", ge=0)
    eps: Number = _key(
        1e-8,
        "of Adam; ProxyNCA++ uses 1.0, and its learning rates go with it",
        ge=1e-30,  # less is zero in float32
    )
    momentum: Number = _key(0.9, "of SGD", ge=0, lt=1)
    clip_value: Number | None = _key(
        None, "clip each entry of the gradients of the model and the proxies", gt=0
    )
    clip_norm: Number | None = _key(None, "clip the norm of the model's gradient", gt=0)


class ScheduleConfig(Section):
    """The learning-rate schedule."""

    name: Literal["constant", "step", "milestones", "plateau", "cosine"] = _key(
        "step", "how the learning rates decay"
    )
    every: AutoCount = _key(10, "epochs between two drops (step); auto takes a third of the epochs")
    at: tuple[Count, ...] = _key((), "epochs of the drops (milestones)")
    factor: Number = _key(0.5, "what a drop multiplies the learning rates by", gt=0, le=1)
    patience: Count = _key(
        4, "evaluations without improvement that are let pass; the next one drops (plateau)"
    )
    freeze_backbone_epochs: Whole = _key(
        0, "epochs at the start that train the head and the proxies only", ge=0
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if list(self.at) != sorted(set(self.at)):
            raise ValueError(f"at must rise, got {shown(list(self.at))}")
        return self


class TrainingConfig(Section):
    """The training loop."""

    epochs: AutoCount = _key(
        60,
        "number of epochs; auto chooses it by the number of training images",
        role="end",
    )
    seed: Annotated[int, Field(strict=True)] = _key(
        0, "random seed of the whole run", ge=0, lt=2**63
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = _key(
        AUTO,
        "of the network (autocast); proxies and loss stay in float32. auto takes bfloat16 on a "
        "CUDA GPU that has it, else float32",
    )
    accumulate: Count = _key(
        1,
        "process each batch in this many chunks (gradient caching): the exact gradient of the "
        "whole batch in less memory; batch norm that is not frozen sees a chunk at a time",
    )
    ema: Number = _key(
        0.0,
        "decay of the exponential moving average of the weights, which is evaluated and saved "
        "instead of the raw weights; 0 for none",
        ge=0,
        lt=1,
    )
    cuda_graph: AutoFlag = _key(
        AUTO,
        "on one CUDA GPU, run the network with fused kernels and as a CUDA graph; elsewhere, and "
        "with accumulate, it does nothing. auto does so where it can",
    )
    stop_after: Whole = _key(
        0,
        "early stopping: evaluations without improvement before the run ends; 0 for never",
        role="end",
        ge=0,
    )
    checkpoint_epochs: Count = _key(1, "epochs between two checkpoints", role="pace")
    checkpoint_steps: Whole = _key(
        0, "also save a checkpoint every so many steps; 0 for never", role="pace", ge=0
    )
    keep_checkpoint_every: Whole = _key(
        0, "keep the checkpoint of every n-th epoch; 0 for last and best alone", role="pace", ge=0
    )
    two_stages: Flag = _key(
        False,
        "find the number of epochs and the learning-rate drops on half of the classes, then train "
        "on all (Teh et al. 2020)",
    )
    wandb: Text | None = _key(None, "project to report to at Weights & Biases", role="pace")

    def is_over(self, epochs: int, stale: int) -> bool:
        """Whether a run ends after so many epochs, so many evaluations after its last improvement.

        All epochs are done, or early stopping ends it.
        """
        return epochs >= self.epochs or 0 < self.stop_after <= stale


class EvaluationConfig(Section):
    """How the run is evaluated and which epoch is saved."""

    protocol: Protocol = _key(
        "held_out",
        "held_out selects the epoch on training classes left out of training; last takes the last "
        "epoch; paper selects on the test set, as many papers do",
    )
    held_out: Number = _key(
        0.2, "fraction of the training classes held out, at least three classes", gt=0, lt=1
    )
    every: Count = _key(
        1, "epochs between two evaluations; at least a tenth of all where nothing is watched"
    )
    watch_test: Flag = _key(
        False,
        "also evaluate the test set each time, for the curve alone: it selects nothing",
        role="pace",
    )
    final_test: Flag = _key(True, "evaluate the test set at the end of the run", role="pace")
    untrained: Flag = _key(
        True, "evaluate the untrained embedder first, as the baseline of every table", role="pace"
    )
    select_by: str = _key(
        "map@r", "the metric that selects the epoch; of equal epochs the later one is taken"
    )
    metrics: Metrics = _key(Metrics(), "what is computed")
    similarity: Similarity = _key("cosine", "how embeddings are compared")
    eval_dims: tuple[Count, ...] = _key(
        (), "also report the metrics of the first d dimensions of the embedding, for each d"
    )
    batch_size: Count = _key(128, "images per forward pass", role="pace", le=LARGEST_BATCH)

    @model_validator(mode="after")
    def _check(self) -> Self:
        computed = [name for name in self.metrics.names() if name not in COUNTS]
        if self.select_by not in computed:
            raise ValueError(
                f"select_by {shown(self.select_by)} is not computed; "
                f"choose one of {some(computed, 12)}"
            )
        return self


class Recipe(Section):
    """Everything about a run except where its results go."""

    name: Text = _key("unnamed", "of the recipe", role="words")
    about: str = _key("", "one sentence: what it is and where its figures come from", role="words")
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    loss: LossConfig = Field(default_factory=LossConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)

    @model_validator(mode="after")
    def _check(self) -> Self:
        dims, width = self.evaluation.eval_dims, self.model.pca_dim or self.model.dim
        if any(dim >= width for dim in dims) or len(set(dims)) < len(dims):
            raise ValueError(
                f"evaluation.eval_dims must differ and be below the embedding's {width} "
                f"dimensions, got {shown(list(dims))}"
            )
        if self.model.bits is not None and dims:
            raise ValueError(
                f"evaluation.eval_dims {shown(list(dims))} and model.bits exclude each other: "
                "codes are compared as a whole; leave one of them out"
            )
        if self.model.bits is not None and self.evaluation.similarity != "cosine":
            raise ValueError(
                f"evaluation.similarity {self.evaluation.similarity} and model.bits exclude each "
                "other: signs keep angles, not distances; use cosine"
            )
        if self.model.bits is None and self.loss.quantization:
            raise ValueError(
                f"loss.quantization {self.loss.quantization:g} is for binary codes: give their "
                "length as model.bits"
            )
        if self.evaluation.protocol == "last" and self.schedule.name == "plateau":
            raise ValueError(
                "schedule.name plateau goes by a selection metric, which evaluation.protocol last "
                "does not have; choose another schedule.name, such as step, or "
                "evaluation.protocol held_out"
            )
        return self

    @classmethod
    def load(
        cls, source: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
    ) -> Recipe:
        """Make a recipe of a YAML file, a shipped recipe's name or plain values, and overrides.

        Keys left out take the value of the recipe named as ``base``, else their default. Keys may
        be nested or dotted, in files and in overrides alike: ``{"optimizer.lr": 1e-3}``.
        """
        values = merge(plain_values(source), overrides or {})
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            sentence = validation_sentence(error, cls)
            if not overrides and not isinstance(source, Mapping):
                sentence = f"{find_recipe(source)}: {sentence}"
            raise RecipeError(sentence) from None

    def override(self, changes: Mapping[str, Any]) -> Recipe:
        """Return this recipe with changes, by nested or dotted keys; everything is checked anew."""
        return Recipe.load(self.model_dump(mode="json", exclude_unset=True), changes)

    def evaluated_every(self, watched: bool) -> int:
        """Epochs between two evaluations; if nothing is watched, they save the embedder alone."""
        return max(self.evaluation.every, 1 if watched else self.training.epochs // 10)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries and lists, as YAML and JSON hold them."""
        return self.model_dump(mode="json")

    def portable(self, *, without: tuple[Role, ...] = ("words", "place")) -> dict[str, Any]:
        """Return the flat keys and values, less those whose role does not matter."""
        values = flatten(self.to_dict())
        for key, role in _roles():
            if role in without:
                del values[key]
        return values

    def essence(self) -> dict[str, Any]:
        """Return the flat keys and values that change what a step computes: those without a role.

        A run continues with the same ones alone.
        """
        values = self.portable(without=get_args(Role))
        if self.data.cache == "encoded":  # the one place whose pixels are other ones
            values["data.cache"] = "encoded"
        values["model.weights"] = self._name_of_weights()
        return values

    def without_places(self) -> Recipe:
        """Return the recipe less where things lie on this machine."""
        places = {key: None for key, role in _roles() if role == "place"}
        return self.override({**places, "model.weights": self._name_of_weights()})

    def _name_of_weights(self) -> str:
        """Of a file of weights its name: where it lies does not matter."""
        weights = self.model.weights
        return weights if weights in WEIGHTS_SOURCES else Path(weights).name or "file"

    def to_yaml(self) -> str:
        """Return YAML that `load` reads back to an equal recipe."""
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    def save(self, path: Path) -> None:
        """Write the YAML file."""
        atomic_write(path, self.to_yaml().encode())


def recipe_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every dotted key of a recipe with its declaration, in order."""
    for name, field in Recipe.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            for key, inner in kind.model_fields.items():
                yield f"{name}.{key}", inner
        else:
            yield name, field


def _roles() -> Iterator[tuple[str, Role | None]]:
    for key, field in recipe_keys():
        extra: Any = field.json_schema_extra
        yield key, extra["role"]


# What goes with model.image_size.
_SIZES = (("model", "resize"), ("data", "crop_size"), ("data", "short_side"))
# What goes with model.dim.
_DIMENSIONS = (
    ("model", "dim"),
    ("model", "pca_dim"),
    ("model", "whitening"),
    ("evaluation", "eval_dims"),
)
# Keys that hold a value each, though the value is a dictionary.
_WHOLE = ("data.columns", "loss.settings", "evaluation.metrics")


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested plain values by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and name not in _WHOLE:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return "key: old → new" for each key in which two flat recipes differ."""
    keys = dict.fromkeys([*now, *before])
    return [
        f"{key} {shown(before.get(key))} → {shown(now.get(key))}"
        for key in keys
        if before.get(key) != now.get(key)
    ]


def merge(
    values: Mapping[str, Any], changes: Mapping[str, Any], *, whole: bool = True
) -> dict[str, Any]:
    """Lay changes over plain values, without what the changes make meaningless.

    Another loss leaves the settings of the old one behind, another image size the sizes that went
    with it. So do new bits the dimensions of what was before, another dimension PCA to no fewer,
    no PCA its whitening, fewer dimensions those `eval_dims` that are not below, and a frozen
    backbone its stochastic depth. Values that are no ``whole`` recipe, but changes too, do not
    say what they leave out; that is then not taken for changed.
    """
    merged, wanted = _lay_over({}, values), _lay_over({}, changes)
    old, new = _section(merged, "model"), _section(wanted, "model")
    if new.get("bits") is not None:
        for section, key in _DIMENSIONS:
            _section(merged, section).pop(key, None)
    if {"dim", "pca_dim"} & new.keys():
        _fit_dimensions(old, new, _section(merged, "evaluation"), whole)
    if new.get("image_size") is not None and _changed("image_size", old, new, ModelConfig, whole):
        for section, key in _SIZES:
            _section(merged, section).pop(key, None)
    if new.get("freeze_backbone"):
        old.pop("drop_path", None)
    loss = _section(merged, "loss")
    if _changed("name", loss, _section(wanted, "loss"), LossConfig, whole):
        loss.pop("settings", None)
    return _lay_over(merged, wanted)


def resets(values: Mapping[str, Any], changes: Mapping[str, Any]) -> list[str]:
    """Return one line per change that makes `merge` reset keys that no change names."""
    before, after = flatten(_lay_over({}, values)), flatten(merge(values, changes))
    named, lines = flatten(_lay_over({}, changes)), []
    lost = {key: old for key, old in before.items() if key not in named and after.get(key) != old}
    for cause, value in named.items():
        alone = flatten(merge(values, {cause: value}))
        here = [key for key, old in lost.items() if alone.get(key) != old]
        if here:
            keys = ", ".join(f"{key} ({shown(lost.pop(key))})" for key in here)
            lines.append(f"{cause} {shown(value)} also resets {keys}")
    return lines


def _fit_dimensions(
    old: dict[str, Any], new: dict[str, Any], evaluation: dict[str, Any], whole: bool
) -> None:
    """Take from a recipe what has no place in the new dimensions of its model."""
    dim, pca_dim = new.get("dim"), old.get("pca_dim")
    without_pca = new.get("pca_dim", 0) is None
    if "pca_dim" not in new and type(dim) is int and type(pca_dim) is int:
        without_pca = dim <= pca_dim and _changed("dim", old, new, ModelConfig, whole)
    if without_pca:
        old.pop("pca_dim", None)
        old.pop("whitening", None)
    width = new.get("pca_dim", old.get("pca_dim")) or new.get("dim", old.get("dim"))
    compared = evaluation.get("eval_dims")
    if type(width) is int and isinstance(compared, (list, tuple)):
        evaluation["eval_dims"] = [d for d in compared if type(d) is not int or d < width]


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of nested values; what is none is refused later."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def _changed(
    key: str, old: dict[str, Any], new: dict[str, Any], section: type[Section], whole: bool
) -> bool:
    """Whether a section has another value of a key than before, as far as that is known."""
    if key not in new or not (whole or key in old):
        return False
    return bool(new[key] != old.get(key, section.model_fields[key].default))


def _lay_over(
    values: dict[str, Any], changes: Mapping[str, Any], *, inside: bool = False
) -> dict[str, Any]:
    """Write changes, nested or dotted, into nested values, and return these.

    Dictionaries are merged entry by entry. An empty one ``inside`` a section replaces the old one.
    """
    for key, value in changes.items():
        if not isinstance(key, str):
            raise RecipeError(f"keys must be text, got {shown(key)}")
        first, _, rest = key.partition(".")
        if rest or (isinstance(value, Mapping) and (value or not inside)):
            old = values.get(first)
            inner = {rest: value} if rest else value
            values[first] = _lay_over(old if isinstance(old, dict) else {}, inner, inside=True)
        elif isinstance(value, Mapping):
            values[first] = {}
        else:
            values[first] = value
    return values


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {_shipped_name(path): path for path in sorted(SHIPPED.rglob("*.yaml"))}


def _shipped_name(path: Path) -> str:
    """What a shipped recipe is called, with its folder; any other by its file alone."""
    inside = path.is_relative_to(SHIPPED)
    return path.relative_to(SHIPPED).with_suffix("").as_posix() if inside else path.stem


def find_recipe(source: str | Path) -> Path:
    """The file of a recipe given by its path or by the name of a shipped one."""
    return find_file(source, shipped_recipes(), "recipe", "recipes")


def find_file(source: str | Path, shipped: Mapping[str, Path], kind: str, command: str) -> Path:
    """The file at a path, else the shipped one of this name; ``command`` lists those."""
    found = Path(source) if is_file(source) else shipped.get(str(source))
    if found is None:
        raise RecipeError(
            f"no {kind} {shown(str(source))}{closest(str(source), shipped)} "
            f"`proximetry {command}` lists the shipped ones"
        )
    return found


def is_file(path: str | Path) -> bool:
    """Whether there is such a file; what is too long to be a name is none."""
    try:
        return Path(path).is_file()
    except OSError:
        return False


def plain_values(
    source: str | Path | Mapping[str, Any], above: tuple[Path, ...] = ()
) -> dict[str, Any]:
    """Return a recipe's nested plain values with those of its bases, unchecked."""
    if isinstance(source, Mapping):
        values, place = dict(source), None
    else:
        place = find_recipe(source)
        if place in above:
            names = " → ".join(path.name for path in (*above, place))
            raise RecipeError(f"recipes must not be based on each other in a circle: {names}")
        values = {"name": _shipped_name(place)} | read_yaml(place, "recipe")
    base = values.pop("base", None)
    if base is None:
        return _lay_over({}, values)
    if not isinstance(base, str):
        raise RecipeError(f"base must name one recipe, got {shown(base)}")
    beside = place.parent / base if place is not None else Path(base)
    found = beside if is_file(beside) else base
    return merge(plain_values(found, (*above, place) if place else above), values)


def read_yaml(path: Path, kind: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file."""
    try:
        values = parse_yaml(read_text(path, _LARGEST_FILE))
    except YamlError as error:
        raise RecipeError(f"{path} is no valid YAML: {error}") from error
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if not isinstance(values, dict):
        raise RecipeError(f"{path} holds no {kind}: expected keys and values")
    return values


class YamlError(ValueError):
    """A text that is no YAML, or none that a person writes."""


def parse_yaml(text: str) -> Any:
    """Return the plain values of a YAML text; each key may stand there once."""
    import yaml

    for number, line in enumerate(text.splitlines(), 1):
        if line.count("[") + line.count("{") > _MOST_BRACKETS:
            raise YamlError(f"line {number} is nested too deeply")
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_nodes(root)
        return loader.construct_document(root)
    except YamlError:
        raise
    except RecursionError:
        raise YamlError("it is nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        where = error.problem_mark.line + 1 if error.problem_mark else 1
        raise YamlError(f"line {where}: {shorten(error.problem or 'unreadable', 200)}") from error
    except Exception as error:
        # Values that look like a date, or that have a tag, raise whatever their reader trips over.
        raise YamlError(f"a value cannot be read: {shorten(str(error), 200)}") from error


def _check_nodes(root: Any) -> None:
    """Refuse what its aliases let grow without end, what is nested deeply, and keys said twice."""
    lines: dict[tuple[str, ...], int] = {}
    left: list[tuple[tuple[str, ...], Any]] = [((), root)]
    for count in itertools.count(1):
        if not left:
            return
        path, node = left.pop()
        line = node.start_mark.line + 1
        if len(path) > _DEEPEST or count > _MOST_VALUES:
            what = "is nested too deeply" if len(path) > _DEEPEST else "makes it too large"
            raise YamlError(f"line {line} {what}")
        if isinstance(node.value, str):
            continue
        inside = []
        for number, entry in enumerate(node.value):
            if not isinstance(entry, tuple):  # of a list
                inside.append(((*path, str(number)), entry))
                continue
            key, value = entry
            name = (*path, *str(key.value).split(".")[: _DEEPEST + 1])
            here = key.start_mark.line + 1
            if name in lines:
                first, second = sorted((lines[name], here))
                raise YamlError(
                    f"line {second} says {shown('.'.join(name))} a second time, after line {first}"
                )
            lines[name] = here
            inside.append((name, value))
        left += reversed(inside)


def validation_sentence(error: ValidationError, model: type[BaseModel]) -> str:
    """Say in one sentence what a validation of pydantic found first, and where."""
    first = error.errors()[0]
    # A part of a location may name the member of a union that was tried, not a key.
    where = ".".join(
        str(part) for part in first["loc"] if part not in ("bool", "int", "float", "str")
    )
    value, context = first["input"], first.get("ctx", {})
    match first["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            section, _, key = where.rpartition(".")
            return f"unknown key {shown(where)}{closest(key, _known_keys(model, section))}"
        case "literal_error":
            allowed = re.findall(r"'([^']+)'", context["expected"])
            near = closest(value if isinstance(value, str) else "", allowed)
            return f"{where} is {shown(value)}{near}"
        case "value_error":  # one of our own checks
            reason = str(context["error"])
            if re.split(r"[.: ]", reason, maxsplit=1)[0] in _known_keys(model, where):
                return f"{where}.{reason}".lstrip(".")
            if reason.startswith(f"{where} "):
                return reason
            joint = " " if reason.startswith(("must ", "is ")) else ": "
            return f"{where}{joint}{reason}" if where else reason
    reason = first["msg"].replace("Input should", "must").replace("valid tuple", "list")
    reason = reason.partition(", unable to parse")[0]
    return f"{where} {reason}, got {shown(value)}"


def _known_keys(model: Any, section: str) -> list[str]:
    for part in filter(None, section.split(".")):
        if part.isdigit():  # an item of a list
            model = get_args(model)[0]
            continue
        fields = getattr(model, "model_fields", None)
        if fields is None or part not in fields:
            return []
        model = fields[part].annotation
    if dataclasses.is_dataclass(model):
        return [field.name for field in dataclasses.fields(model)]
    return list(getattr(model, "model_fields", ()))
