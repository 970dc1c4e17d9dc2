"""`Updater`: update the weights to minimize the `Objective` over all processes."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from proximetry import losses
from proximetry._util.errors import UsageError
from proximetry._util.tensors import chunks
from proximetry.kernels.cuda_graphs import GraphedNetwork
from proximetry.losses.gathered_loss import gather_with_gradient
from proximetry.models import Embedder, Preprocessing
from proximetry.models.embedder import Stage
from proximetry.recipe.loading import RecipeError
from proximetry.recipe.schema import LossConfig, Recipe
from proximetry.training.distributed import World, average_gradients
from proximetry.training.sources.training_data import derive_seed


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return an autocast context for the precision of a recipe."""
    enabled = precision != "float32"
    dtype = getattr(torch, precision) if enabled else None
    # The cache of cast weights would outlive a CUDA graph that was recorded with it.
    return torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False)


class Objective(nn.Module):
    """Loss and regularizers in one module with one state dictionary.

    Class names, and the numbers of training images of the classes, are in the order of the labels;
    ``custom_loss`` replaces the loss of the config.
    """

    def __init__(
        self,
        config: LossConfig,
        class_names: Sequence[str],
        dim: int,
        custom_loss: nn.Module | None = None,
        class_counts: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.loss: nn.Module
        pairs, n = config.name.removeprefix("pairs/"), len(class_names)
        if custom_loss is not None:
            self.loss = custom_loss
        elif pairs != config.name:
            self.loss = losses.PairLoss(pairs, dim=dim, **config.settings)  # type: ignore[arg-type]
        else:
            with torch.device("meta") if config.sharded else nullcontext():
                self.loss = losses.create(config.name, n, dim, **config.settings)
        # The parameters of a custom loss have the learning rate of proxies.
        self.uses_proxy_lr = custom_loss is not None and not isinstance(
            custom_loss, losses.ProxyLoss
        )
        proxies = None
        if isinstance(self.loss, losses.ProxyLoss):
            self.loss.check_labels = False  # they come from the catalog
            proxies = self.loss.proxies
            if (proxies.num_classes, proxies.dim) != (n, dim):
                raise UsageError(
                    f"loss {type(custom_loss).__name__} has {proxies.num_classes} classes and "
                    f"{proxies.dim} dimensions, but the run has {n} training classes (without "
                    f"held-out ones; evaluation.protocol last has none) and {dim} dimensions"
                )
            if config.sharded:
                proxies = losses.shard(self.loss).proxies
            proxies.names = list(class_names)
            if class_counts is not None:
                self.loss.set_class_counts(class_counts)
        self.proxies = proxies
        self.projected = config.optimization == "projected"
        for key, is_set in (
            ("exclusive", config.exclusive),
            ("angular_center", config.angular_center),
            ("nested_dims", config.nested_dims),
            ("proxy_momentum", config.proxy_momentum is not None),
            ("optimization", self.projected),
            ("sharded", config.sharded),
        ):
            if is_set and proxies is None:
                raise RecipeError(f"loss.{key} needs proxies; loss {config.name} has none")
        self.nested_dims = config.nested_dims
        self.proxy_momentum = config.proxy_momentum
        self._batch: tuple[Tensor, Tensor] | None = None
        if proxies is not None and self.proxy_momentum is not None:
            if proxies.proxies_per_class > 1:
                raise RecipeError("loss.proxy_momentum needs one proxy per class")
            proxies.weight.requires_grad_(False)
        self.after_step()  # project before the first step too: the loss depends on proxy norms
        self.exclusive = losses.ExclusiveRegularizer(config.exclusive) if config.exclusive else None
        self.angular_center = (
            losses.AngularCenterLoss(config.angular_center) if config.angular_center else None
        )
        self.relational = losses.RelationalLoss(config.relational) if config.relational else None

    def forward(self, embeddings: Tensor, labels: Tensor, teacher: Tensor | None = None) -> Tensor:
        """Return the sum of the terms, for the embeddings and those of the teacher."""
        ramp = self.loss.ramp() if isinstance(self.loss, losses.ProxyLoss) else 1.0
        parts = [self.loss(embeddings, labels, truncate_dim=d) for d in self.nested_dims]
        total: Tensor = self.loss(embeddings, labels)  # calling the loss advances the ramp
        if parts:
            total = torch.stack([*parts, total]).mean()
        if self.proxy_momentum is not None:
            self._batch = embeddings.detach(), labels
        if self.exclusive is not None and self.proxies is not None:
            total = total + ramp * self.exclusive(self.proxies)
        if self.angular_center is not None and self.proxies is not None:
            total = total + self.angular_center(embeddings, labels, self.proxies)
        if self.relational is not None:
            total = total + self.relational(embeddings, teacher)
        return total

    @property
    def is_recordable(self) -> bool:
        """Whether a CUDA graph can include the loss: one of this package, without other terms."""
        return (
            type(self.loss) in losses.LOSSES.values()
            and isinstance(self.loss, losses.ProxyLoss)
            and self.loss.proxy_optimizer is None
            and self.loss.sampled_negatives == self.loss.sampled_dims == 1.0
            and self.loss.synthesis == 0.0
            and self.proxy_momentum is None
            and self.exclusive is None
            and self.angular_center is None
            and self.relational is None
        )

    @property
    def sharded_weight(self) -> nn.Parameter | None:
        """The proxies of this rank, if they are sharded."""
        return self.proxies.weight if isinstance(self.proxies, losses.ShardedProxies) else None

    def after_step(self) -> None:
        """Update or project the proxies, if the recipe sets it."""
        if self.proxies is not None and self._batch is not None:
            assert self.proxy_momentum is not None
            self.proxies.update_mean_(*self._batch, self.proxy_momentum)
            self._batch = None
        if self.projected and self.proxies is not None:
            self.proxies.project_()


class TrainingNetwork(nn.Module):
    """The embedder in training: in the recipe's precision, with dropout."""

    def __init__(
        self, embedder: Embedder, recipe: Recipe, device: torch.device, stage: Stage
    ) -> None:
        super().__init__()
        self.embedder, self.device, self.stage = embedder, device, stage
        self.precision, self.dropout = recipe.training.precision, recipe.model.dropout

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the embeddings of a batch."""
        with autocast(self.precision, self.device):
            features = self.embedder.features(pixels, self.stage)
            if self.dropout:
                features = F.dropout(features, self.dropout)
            return self.embedder.project(features)


def as_teacher(average: Embedder) -> Embedder:
    """Prepare a moving average as a teacher: without dropout and test-time augmentation.

    Batch norm is in the mode of the trained embedder, whose statistics are copied to the average
    after each step.
    """
    average.eval()
    average.training = True
    for layer in average.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
    return average


def embed(embedder: Embedder, pixels: Tensor, stage: Stage) -> Tensor:
    """Return the embeddings of a batch in the stage of the data."""
    return embedder.project(embedder.features(pixels, stage))


def resize_crops(pixels: Tensor, preprocessing: Preprocessing) -> Tensor:
    """Resize uint8 crops [B, 3, H, W] to the input size of another embedder."""
    if pixels.shape[2:] == preprocessing.crop:
        return pixels
    resized = F.interpolate(
        pixels.float(), preprocessing.crop, mode=preprocessing.interpolation, antialias=True
    )
    return resized.clamp_(0, 255).round_().to(torch.uint8)


class BatchLoss(nn.Module):
    """The loss of a batch of pixels."""

    def __init__(self, network: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.network, self.objective = network, objective

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        return self.objective(self.network(pixels), labels)  # type: ignore[no-any-return]


class Updater:
    """Updates embedder, loss and moving average, step by step.

    Attributes:
        network: pixels to embeddings, wrapped for the GPU or for several processes.
        average: the exponential moving average of the embedder's weights, if there is one.
        teacher: the embedder that `loss.relational` follows, or None; a saved one gets the crops
            in its own input size.
        scaler: gradient scaler for float16.
        graph: whether the network, and its loss if possible, run as a CUDA graph.
    """

    def __init__(
        self,
        recipe: Recipe,
        embedder: Embedder,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        graph: bool,
        on_graph_failure: Callable[[str], None] | None = None,
        stage: Stage = "pixels",
        teacher: Embedder | None = None,
    ) -> None:
        self.recipe, self.world, self.stage = recipe, world, stage
        self.embedder, self.objective, self.optimizer = embedder, objective, optimizer
        self.average = copy.deepcopy(embedder) if recipe.training.ema else None
        self.teacher = teacher
        self._resizes = teacher is not None and stage == "pixels" and teacher.takes_images
        if objective.relational is not None and teacher is None and self.average is not None:
            self.teacher = as_teacher(self.average)
        self.scaler = torch.amp.GradScaler(
            world.device.type, enabled=recipe.training.precision == "float16"
        )
        self._training_network = TrainingNetwork(embedder, recipe, world.device, stage)
        # A loss with sharded proxies gathers the batch.
        self._gathers = world.size > 1 and objective.sharded_weight is None
        self.graph, self._on_graph_failure = graph, on_graph_failure
        self._frozen: bool | None = None
        self._buffers: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        if self.average is not None:
            for average, buffer in zip(self.average.buffers(), embedder.buffers(), strict=True):
                averages, buffers = self._buffers.setdefault(buffer.dtype, ([], []))
                averages.append(average)
                buffers.append(buffer)
        self.freeze_backbone(recipe.schedule.freeze_backbone_epochs > 0)  # as in the first epoch

    def freeze_backbone(self, frozen: bool) -> bool:
        """Freeze or unfreeze the backbone; return whether it changed, which slows the next step."""
        parts = self.embedder.parameter_parts()
        # Always frozen with precomputed features, never without a head.
        frozen = (frozen and bool(parts["head"])) or self.stage == "features"
        if frozen == self._frozen:
            return False
        self._frozen = frozen
        for parameter in parts["backbone"]:
            parameter.requires_grad_(not frozen)
        # Listing tensors at every step would take longer than updating a small network.
        self._trained: list[Tensor] = [p for p in self.embedder.parameters() if p.requires_grad]
        if self.average is not None:
            pairs = zip(self.average.parameters(), self.embedder.parameters(), strict=True)
            self._averages: list[Tensor] = [average for average, p in pairs if p.requires_grad]
        # CUDA graphs and DistributedDataParallel depend on which parameters are trained.
        self.network: nn.Module = self._training_network
        self._batch_loss: nn.Module | None = None
        if self.graph:
            self.network = GraphedNetwork(self._training_network, self._on_graph_failure)
            if self.objective.is_recordable:
                whole = BatchLoss(self._training_network, self.objective)
                self._batch_loss = GraphedNetwork(whole, self._on_graph_failure)
        if self.world.size > 1:  # a custom network may not use all of its parameters
            unused = self.embedder.is_custom
            self.network = DistributedDataParallel(self.network, find_unused_parameters=unused)
        return True

    def __call__(self, pixels: Tensor, labels: Tensor, step: int) -> Tensor:
        """Run one training step; return the loss of the whole batch over all processes."""
        o, loss = self.recipe.optimizer, self.backward(pixels, labels, step)
        if o.clip_value is not None:
            nn.utils.clip_grad_value_([*self._trained, *self.objective.parameters()], o.clip_value)
        if o.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._trained, o.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.objective.after_step()
        if self.average is not None:  # early on, the EMA is close to a plain mean
            decay = min(self.recipe.training.ema, (1 + step) / (10 + step))
            with torch.no_grad():
                # One launch, as in torch's EMA.
                torch._foreach_lerp_(self._averages, self._trained, 1 - decay)
                for averages, buffers in self._buffers.values():
                    torch._foreach_copy_(averages, buffers)
        return loss

    def backward(self, pixels: Tensor, labels: Tensor, step: int) -> Tensor:
        """Compute the gradients and return the loss.

        With `accumulate` the batch runs through the network in chunks, twice: first for the
        embeddings, to compute loss and gradient of the whole batch, then for the gradients of the
        weights (gradient caching). The result equals that of the whole batch, in the memory of a
        chunk.
        """
        # Every step has its own seed, so a resumed run draws the same random numbers.
        torch.manual_seed(derive_seed(self.recipe.training.seed, step, self.world.rank))
        self.optimizer.zero_grad(set_to_none=True)
        count = self.recipe.training.accumulate
        all_labels = gather_with_gradient(labels) if self._gathers else labels
        if self._batch_loss is not None:
            loss = self._backward(self._batch_loss(pixels, labels))
        elif count == 1:
            loss = self._loss(self.network(pixels), all_labels, step, [pixels])
        else:
            parts = list(enumerate(chunks(len(pixels), -(-len(pixels) // count))))
            with torch.no_grad():
                chunk_embeddings = [self._embed_chunk(pixels[part], step, i) for i, part in parts]
            embeddings = torch.cat(chunk_embeddings).requires_grad_()
            loss = self._loss(embeddings, all_labels, step, [pixels[part] for _, part in parts])
            assert embeddings.grad is not None
            for i, part in parts:
                chunk = self._embed_chunk(pixels[part], step, i)
                chunk.backward(embeddings.grad[part])  # type: ignore[no-untyped-call]
        self.scaler.unscale_(self.optimizer)
        if self.world.size > 1:
            sharded = self.objective.sharded_weight
            replicated = [p for p in self.objective.parameters() if p is not sharded]
            average_gradients(replicated, self.world)
        return loss

    def _loss(
        self, embeddings: Tensor, labels: Tensor, step: int, pixels: Sequence[Tensor]
    ) -> Tensor:
        teacher = None
        if self.teacher is not None:
            with torch.no_grad(), autocast(self.recipe.training.precision, self.world.device):
                if self._resizes:
                    pixels = [resize_crops(chunk, self.teacher.preprocessing) for chunk in pixels]
                teacher = torch.cat([embed(self.teacher, chunk, self.stage) for chunk in pixels])
        # Any number of ranks computes the same loss, even if it draws random numbers.
        torch.manual_seed(derive_seed(self.recipe.training.seed, step))
        if self._gathers:
            embeddings = gather_with_gradient(embeddings)
            teacher = None if teacher is None else gather_with_gradient(teacher)
        return self._backward(self.objective(embeddings, labels, teacher))

    def _backward(self, loss: Tensor) -> Tensor:
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        return loss.detach().double()

    def _embed_chunk(self, pixels: Tensor, step: int, number: int) -> Tensor:
        # Both passes over a chunk must drop the same units.
        torch.manual_seed(derive_seed(self.recipe.training.seed, step, self.world.rank, number))
        return self.network(pixels)  # type: ignore[no-any-return]
