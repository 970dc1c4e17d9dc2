"""The base class of proxy losses, the registry, and the validation of a batch."""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proximetry._util.errors import suggest
from proximetry._util.labels import as_labels
from proximetry._util.tensors import common_random_numbers, l2_normalize
from proximetry.losses.adjustments import ADJUSTMENTS
from proximetry.losses.batch import Batch, Engine, mean, normalize, pull
from proximetry.losses.dense import (
    cosines,
    dense,
    join_by_sample,
    own_similarity,
    present_classes,
    pull_by_class,
    reduce_proxies,
)
from proximetry.losses.form import MAX_FUSED_K, LossForm, Precision, Problem
from proximetry.losses.proxies import Init, Proxies
from proximetry.losses.proxy_optimizers import ProxyOptimizer
from proximetry.losses.sampling import sampled
from proximetry.losses.settings import (
    LOSS_SETTINGS,
    ConfigurableModule,
    check_settings,
    count,
    fraction,
    one_of,
    optional,
    setting,
    share,
    similarity,
)
from proximetry.losses.sharded import ShardedProxies
from proximetry.losses.streamed import streamed
from proximetry.losses.synthesis import synthesize

Labels = Tensor | NDArray[np.integer[Any]] | Sequence[int]
"""Class indices [B], or `IGNORED`."""
Weights = Tensor | NDArray[np.floating[Any]] | Sequence[float]
"""Sample weights [B]."""
EngineName = Literal["auto", "dense", "streamed", "fused"]
Reduction = Literal["mean", "sum", "none"]
_reduction = one_of(*get_args(Reduction))

#: The label of samples that a loss ignores.
IGNORED = -1
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

#: ``auto`` does not choose the dense engine when batch × classes × K has more entries than this
#: (4 MiB in float32).
DENSE_ENTRIES = 2**20

LOSSES: dict[str, "type[ProxyLoss]"] = {}
"""Every proxy loss by its name in recipes and on the command line."""


class ProxyLoss(ConfigurableModule):
    """Base of the proxy losses: a form, settings and proxies; subclasses add the logits.

    A ``name`` in the class statement registers the loss. Settings may be changed between steps; an
    invalid value raises on assignment.
    """

    num_classes: InitVar[int] = setting(count, "number of classes C")
    dim: InitVar[int] = setting(count, "embedding dimension D")
    engine: EngineName = setting(
        one_of(*get_args(EngineName)),
        "how the loss is computed; the result is the same",
        default="auto",
        last=True,
    )
    precision: Precision = setting(
        one_of(*get_args(Precision)),
        "precision of matrix products in the fused engine; auto follows torch's matmul precision "
        "and autocast",
        default="auto",
        last=True,
    )
    sampled_negatives: float = setting(
        share,
        "fraction of the classes used in a training step: the classes of the batch and random "
        "others (Partial FC)",
        default=1.0,
        last=True,
    )
    sampled_dims: float = setting(
        share,
        "fraction of the dimensions used in a training step, at random (Unicom)",
        default=1.0,
        last=True,
    )
    ignore_above: float | None = setting(
        optional(similarity),
        "ignore negatives with a similarity S above this: they may belong to the sample's class",
        default=None,
        last=True,
    )
    synthesis: float = setting(
        fraction,
        "number of synthetic samples and classes in a training step, as a fraction of the batch "
        "(Proxy Synthesis)",
        default=0.0,
        last=True,
    )

    use: ClassVar[str] = ""
    """When to use the loss, for the documentation."""
    form: ClassVar[LossForm]
    default_init: ClassVar[Init] = "kaiming_normal"
    # Defaults of settings that a loss does not declare. Unannotated, so they are not arguments.
    gamma = 1.0
    tau = 0.0
    label_smoothing = 0.0
    optional_settings = ("gamma", "tau", "label_smoothing")
    check_labels = True
    """Whether to validate labels and weights, which synchronizes with the GPU once per step."""

    def __init_subclass__(cls, name: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if name is not None:
            old = LOSSES.get(name, cls)
            if (old.__module__, old.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(
                    f"loss name already registered for {old.__name__}: {name!r}. Use another name."
                )
            LOSSES[name], LOSS_SETTINGS[name] = cls, cls.settings()

    def build(self, arguments: dict[str, Any]) -> None:
        """Create the proxies, K per class if the loss has ``proxies_per_class``."""
        shape = arguments["num_classes"], arguments["dim"], arguments.get("proxies_per_class", 1)
        self.proxies = Proxies(*shape, init=self.default_init)
        #: Updates the proxies during backward in training mode, instead of giving them a gradient.
        self.proxy_optimizer: ProxyOptimizer | None = None

    def positive_logit(self, similarity: Tensor, batch: Batch) -> Tensor:
        """Return the logit of each sample's class from its similarity S [B].

        ``batch`` has lengths ‖x‖, labels and weights. Losses without a margin use the logit of the
        other classes.
        """
        scale, offset = self.negative_logit(batch)
        return scale * similarity + offset

    def negative_logit(self, batch: Batch) -> tuple[float | Tensor, float | Tensor]:
        """Return (scale, offset) of the other classes' logit, ``scale · S + offset``.

        Both are a number or one per sample [B], which may have a gradient. If `LossForm.adjust`
        gives φ(S), the logit is ``scale · φ(S) + offset``.
        """
        raise NotImplementedError

    def adjust_arguments(self, batch: Batch) -> tuple[Any, Any]:
        """Return the limit and the value for `LossForm.adjust`.

        The fused engine needs one limit per sample [B, 1] or None, and a number or a tensor with
        one number, without gradients. ``batch.own`` has the similarities to the samples' classes.
        Backward uses the arguments again: copy state that the next step changes.
        """
        return None, 0.0

    def join(self, positive: Tensor, negatives: Tensor) -> Tensor:
        """Return the terms of the samples [B] from the positive logits and `Parts.negatives`."""
        return join_by_sample(self.form, positive, negatives)

    def penalty(self, batch: Batch) -> Tensor | None:
        """Return numbers [B] to add to the terms of the samples; only for sample-wise losses."""
        return None

    def update_state(self, batch: Batch) -> None:
        """Update buffers in place, before the logits; called once per step in training mode."""

    def set_class_counts(self, counts: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Set the number of training images of each class [C]; most losses do not use it."""

    def negative_weight(
        self, classes: int, present: Callable[[], tuple[Tensor, Tensor]]
    ) -> float | Tensor:
        """Return the weight of each class's negative term in a class-wise loss: 1 / C.

        ``present()`` returns a tensor that is 1 for classes in the batch and 0 for the others, and
        the number of classes in the batch. With sharded proxies, the tensor covers the classes of
        this rank.
        """
        return 1.0 / classes

    def ramp(self) -> float | Tensor:
        """Return the warm-up factor of an added exclusive term at this step."""
        return 1.0

    def check_synthesis(self) -> None:
        """Raise if the loss does not support synthetic classes."""
        counts_classes = type(self).set_class_counts is not ProxyLoss.set_class_counts
        for applies, problem in (
            (self.proxies.proxies_per_class > 1, "several proxies per class"),
            (isinstance(self.proxies, ShardedProxies), "sharded proxies"),
            (self.proxy_optimizer is not None, "a proxy optimizer"),
            (counts_classes, f"{type(self).__name__}, which needs the size of each class"),
        ):
            if applies:
                raise ValueError(f"synthesis does not support {problem}. Set it to 0.")

    def forward(
        self,
        embeddings: Tensor,
        labels: Labels,
        weights: Weights | None = None,
        *,
        reduction: Reduction = "mean",
        truncate_dim: int | None = None,
    ) -> Tensor:
        """Compute the loss of a batch.

        Args:
            embeddings: [B, D], of any length.
            labels: class indices [B]; samples of label -1 are ignored.
            weights: sample weights [B]; a sample of weight w counts as w samples.
            reduction: "mean", "sum" or "none". "none" returns per-sample terms [B], already
                weighted; class-wise losses return per-class terms [C] whose mean is the loss.
            truncate_dim: use only the first dimensions of embeddings and proxies; do not update the
                state of the loss. Embeddings are scaled by √(D / truncate_dim): some losses use
                lengths.

        Returns:
            A scalar, or the terms; float32 unless the proxies are float64.

        Raises:
            ValueError: for invalid shapes, types, labels or weights.
        """
        _reduction("reduction", reduction)
        shard = None
        if isinstance(self.proxies, ShardedProxies):
            shard, embeddings, labels, weights = self.proxies.gather(embeddings, labels, weights)
        classes, dim = self.proxies.num_classes, self.proxies.dim
        labels = validate_batch(embeddings, labels, dim, classes if self.check_labels else None)
        if weights is not None:
            weights = weights_tensor(embeddings, weights, self.check_labels)
        precision = self.precision
        if precision == "auto" and torch.is_autocast_enabled(embeddings.device.type):
            precision = "bf16"
        with without_autocast(embeddings.device.type):
            proxies: Tensor = self.proxies.weight
            dims = self._choose_dims(truncate_dim, None if shard is None else shard.seed)
            if dims is not None:
                proxies = proxies[:, :, dims].contiguous()
                # Some losses use lengths, which should not depend on the number of dimensions.
                factor = (embeddings.shape[1] / proxies.shape[2]) ** 0.5
                embeddings = embeddings[:, dims] * factor
            if self.training and self.synthesis:
                self.check_synthesis()
                embeddings, labels, weights, proxies = synthesize(
                    embeddings, labels, weights, proxies, self.synthesis
                )
            name = self.choose_engine(len(embeddings))
            engine = _ENGINES[name]()
            batch = engine.normalize(embeddings, labels, weights, proxies.dtype)
            if self.form.adjust is not None:
                own_of = own_similarity if shard is None else shard.own_similarity
                own = own_of(batch.x, proxies, batch.labels, self.form, self.gamma)
                batch = batch._replace(own=own)
            if self.training and truncate_dim is None:
                with torch.no_grad():
                    self.update_state(batch)
            scale, offset = self.negative_logit(batch)
            limit, value = self.adjust_arguments(batch)
            update, optimizer = None, self.proxy_optimizer if self.training else None
            if optimizer is not None:
                optimizer.check(self.proxies)
                update = optimizer.fused_update if name == "fused" else optimizer.update
            problem = Problem(
                batch.x, proxies, batch.labels, self.form, self.gamma, scale, offset,
                has_weights=weights is not None, needs_distance=self.tau > 0.0,
                ignore_above=self.ignore_above, precision=precision, update=update, limit=limit,
                value=value,
            )  # fmt: skip
            if self.training and self.sampled_negatives < 1.0:
                share, solve = self.sampled_negatives, engine.solve
                solve = partial(sampled, solve, share=share, weights=batch.weights)
                engine = engine._replace(solve=solve)
            if shard is not None:
                return shard.compute(self, engine, problem, batch, reduction)
            reduce = self._reduce_by_class if self.form.by == "class" else self._reduce_by_sample
            loss, factor, distance = reduce(engine, problem, batch, reduction)
            return loss if distance is None else loss + self.tau * distance * factor

    def _choose_dims(self, truncate_dim: int | None, seed: int | None) -> Tensor | slice | None:
        """Return the dimensions to use, in ascending order; None for all."""
        dim = self.proxies.dim
        size = dim if truncate_dim is None else count("truncate_dim", truncate_dim)
        if size > dim:
            raise ValueError(f"truncate_dim must be at most {dim}, got {size}")
        number = max(1, round(self.sampled_dims * size)) if self.training else size
        if number == dim:
            return None
        if self.training and self.proxy_optimizer is not None:
            raise ValueError("a proxy optimizer needs all dimensions. Use another optimizer.")
        if number == size:
            return slice(size)
        device = self.proxies.weight.device
        with common_random_numbers(seed, device):
            return torch.randperm(size)[:number].sort().values.to(device)

    def choose_engine(self, batch_size: int) -> str:
        """Return the engine for a batch of this size, with "auto" resolved."""
        if self.engine != "auto":
            return self.engine
        weight = self.proxies.weight
        is_small = batch_size * weight.shape[0] * weight.shape[1] <= DENSE_ENTRIES
        if is_small and self.proxy_optimizer is None:
            return "dense"
        is_fused = weight.dtype == torch.float32 and weight.shape[1] <= MAX_FUSED_K
        is_fused = is_fused and self.form.adjust in (None, *ADJUSTMENTS)
        return "fused" if is_fused and _has_fused_engine(weight.device) else "streamed"

    def _reduce_by_sample(
        self, engine: Engine, problem: Problem, batch: Batch, reduction: Reduction
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the reduced loss, the same reduction of 1, and the intra-class distance."""
        # Sharded proxies are a part of the classes; synthetic classes are additional.
        classes = max(self.proxies.num_classes, len(problem.proxies))
        smoothing = self.label_smoothing
        parts = engine.solve(replace(problem, needs_total=smoothing > 0.0))
        positive = self.positive_logit(parts.positive, batch)
        terms, weights = self.join(positive, parts.negatives), batch.weights
        if parts.total is not None:
            others = problem.scale * (parts.total - parts.positive) + problem.offset * (classes - 1)
            terms = terms + smoothing * (positive - (positive + others) / classes)
        penalty = self.penalty(batch)
        if penalty is not None:
            terms = terms + penalty
        if reduction == "mean":
            return *engine.mean(terms, weights), parts.distance
        terms = terms * weights
        if reduction == "sum":
            return terms.sum(), weights.sum(), parts.distance
        return terms, weights, parts.distance

    def _reduce_by_class(
        self, engine: Engine, problem: Problem, batch: Batch, reduction: Reduction
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Reduce a class-wise loss; see `_reduce_by_sample`."""
        labels, log_weights, classes = batch.labels, batch.log_weights, len(problem.proxies)

        def present() -> tuple[Tensor, Tensor]:
            is_present = present_classes(labels, batch.weights, classes)
            return is_present, is_present.sum()

        class_weight = self.negative_weight(classes, present)
        per_class = reduction == "none"
        weight = None if per_class else class_weight
        parts = engine.solve(replace(problem, class_weight=weight, log_weights=log_weights))
        logit = self.positive_logit(parts.positive, batch)
        if per_class:
            _, count = present()
            terms = pull_by_class(logit + log_weights, labels, classes) / count.clamp(min=1.0)
            terms = classes * (terms + class_weight * parts.negatives)
            return terms, count.clamp(max=1.0), parts.distance
        value, factor = engine.pull(logit, batch, classes)
        value = value + parts.negatives
        if reduction == "sum":
            value, factor = value * classes, factor * classes
        return value, factor, parts.distance

    def similarities(self, embeddings: Tensor) -> Tensor:
        """Return S(x, c) for every class, [B, C]: the nearest class is the arg max."""
        with torch.autocast(embeddings.device.type, enabled=False):
            x, _ = l2_normalize(embeddings.to(self.proxies.weight.dtype))
            s, _ = cosines(x, self.proxies.weight)
            return reduce_proxies(s, self.form.similarity, self.gamma)


@cache
def _has_fused_engine(device: torch.device) -> bool:
    """Return whether the device is a GPU with bf16 matrix units, and Triton is installed."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and torch.cuda.get_device_capability(device) >= (8, 0)


def _fused_engine() -> Engine:
    from proximetry.losses import fused, fused_batch  # need Triton

    return Engine(fused.fused, fused_batch.normalize, fused_batch.pull, fused_batch.mean)


_ENGINES: dict[str, Callable[[], Engine]] = {
    "dense": partial(Engine, dense, normalize, pull, mean),
    "streamed": partial(Engine, streamed, normalize, pull, mean),
    "fused": _fused_engine,
}


def without_autocast(device_type: str) -> AbstractContextManager[None]:
    """Return a context that disables autocast; a null context, which is faster, if it is off."""
    is_enabled = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_enabled else nullcontext()


def create(name: str, num_classes: int, dim: int, **settings: Any) -> ProxyLoss:
    """Return a proxy loss by name; raise ValueError for unknown names, settings and values."""
    if name not in LOSSES:
        raise ValueError(f"unknown loss {name!r}{suggest(name, LOSSES)}")
    check_settings(name, settings)
    return LOSSES[name](num_classes, dim, **settings)


def validate_batch(
    embeddings: Tensor, labels: Labels, dim: int | None = None, num_classes: int | None = None
) -> Tensor:
    """Return the labels as int64; raise for invalid shapes and types.

    With ``num_classes``, also raise for labels outside the classes except `IGNORED`. On CUDA this
    synchronizes.
    """
    if not isinstance(embeddings, Tensor):
        raise ValueError(f"embeddings must be a tensor, got {type(embeddings).__name__}")
    shape = list(embeddings.shape)
    if len(shape) != 2 or shape[0] == 0:
        raise ValueError(f"embeddings must be [batch, dim] and not empty, got shape {shape}")
    if dim is not None and shape[1] != dim:
        raise ValueError(f"embeddings have {shape[1]} dimensions, but the loss has dim={dim}")
    if not embeddings.is_floating_point():
        raise ValueError(f"embeddings must be floating point, got {embeddings.dtype}")
    labels = labels_tensor(embeddings, labels)
    if labels.dtype not in _INTEGERS:
        raise ValueError(f"labels must be integers (class indices), got {labels.dtype}")
    if labels.shape != embeddings.shape[:1]:
        shape = list(labels.shape)
        raise ValueError(
            f"labels must have shape [{len(embeddings)}], one per embedding; got {shape}"
        )
    if num_classes is not None and not torch.compiler.is_compiling():
        low, high = torch.stack(labels.aminmax()).tolist()
        if low < IGNORED or high >= num_classes:
            label = low if low < IGNORED else high
            position = int((labels == label).nonzero()[0, 0])
            raise ValueError(
                f"label {label} (position {position} of the batch) is outside "
                f"0..{num_classes - 1}. Create the loss with a larger num_classes, or use label "
                f"{IGNORED} to ignore a sample."
            )
    return labels.long()


def labels_tensor(embeddings: Tensor, labels: Labels) -> Tensor:
    """Return labels as a tensor; move lists and arrays to the device of the embeddings."""
    if isinstance(labels, Tensor):
        return labels
    array = as_labels(labels, len(embeddings))
    if array.dtype.kind != "i":
        raise ValueError("labels must be integers (class indices), got strings")
    return torch.from_numpy(array).to(embeddings.device)


def weights_tensor(embeddings: Tensor, weights: Weights, check_range: bool = False) -> Tensor:
    """Return the weights as a tensor [B] on the device of the embeddings.

    With ``check_range``, raise for negative and non-finite weights. On CUDA this synchronizes.
    """
    if not isinstance(weights, Tensor):
        try:
            weights = torch.from_numpy(np.asarray(weights, np.float64))
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"weights must be numbers, one for each sample: {error}") from error
    if weights.shape != embeddings.shape[:1]:
        shape = list(weights.shape)
        raise ValueError(
            f"weights must have shape [{len(embeddings)}], one per embedding; got {shape}"
        )
    weights = weights.detach().to(embeddings.device)
    if check_range and not torch.compiler.is_compiling():
        invalid = ~((weights >= 0) & torch.isfinite(weights))
        if invalid.any():
            position = int(invalid.nonzero()[0, 0])
            raise ValueError(
                f"weight {weights[position].item()} (position {position} of the batch) must be a "
                "finite number of at least 0"
            )
    return weights
