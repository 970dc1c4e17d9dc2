"""The proxies of the classes, and parameter groups for optimizers."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proximetry._util.tensors import l2_normalize
from proximetry.losses.dense import add_rows_
from proximetry.losses.settings import (
    FullPrecision,
    count,
    fraction,
    non_negative,
    one_of,
    positive,
)

Init = Literal["kaiming_normal", "kaiming_uniform", "normal", "small_normal", "sphere"]


def draw(
    shape: tuple[int, int, int],
    init: Init,
    generator: torch.Generator | None,
    num_classes: int | None = None,
) -> Tensor:
    """Draw proxies [C, K, D], initialized as in the authors' code.

    The loss does not depend on the length of a proxy, but the angle of an optimizer step does:
    published learning rates need the published initialization. ``num_classes`` is the total number
    of classes if these are a part of them.

    - ``kaiming_normal`` (Proxy-Anchor): standard deviation √(2 / (C·K));
    - ``kaiming_uniform`` (SoftTriple): uniform in ±1 / √(C·K);
    - ``normal`` (Proxy-NCA, ProxyNCA++): standard deviation 1/8;
    - ``small_normal`` (CosFace, ArcFace): standard deviation 0.01;
    - ``sphere`` (SphereFace, RegularFace): uniform on the unit sphere.
    """
    one_of(*get_args(Init))("init", init)
    proxies = (num_classes or shape[0]) * shape[1]
    weight = torch.empty(shape)
    if init == "kaiming_uniform":
        bound = 1.0 / math.sqrt(proxies)
        return weight.uniform_(-bound, bound, generator=generator)
    if init == "sphere":
        return l2_normalize(weight.normal_(generator=generator))[0]
    deviation = {"kaiming_normal": math.sqrt(2.0 / proxies), "normal": 1 / 8, "small_normal": 0.01}
    return weight.normal_(0.0, deviation[init], generator=generator)


class Proxies(FullPrecision):
    """K learned vectors for each of C classes: ``weight`` of shape [C, K, D].

    The weight stays in float32 or float64 (see `FullPrecision`). Class names are saved in the state
    dictionary as bytes, so that it contains tensors only.
    """

    names_utf8: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        proxies_per_class: int = 1,
        *,
        init: Init = "kaiming_normal",
        names: Sequence[str] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        shape = (
            count("num_classes", num_classes),
            count("proxies_per_class", proxies_per_class),
            count("dim", dim),
        )
        self.init: Init = init
        self.weight = nn.Parameter(draw(shape, init, generator))
        self.register_buffer("names_utf8", _encode_names(names, num_classes))

    @property
    def num_classes(self) -> int:
        """The number of classes, C."""
        return self.weight.shape[0]

    @property
    def proxies_per_class(self) -> int:
        """The number of proxies of each class, K."""
        return self.weight.shape[1]

    @property
    def dim(self) -> int:
        """The dimension of a proxy, D."""
        return self.weight.shape[2]

    @property
    def names(self) -> list[str] | None:
        """The class names in the order of the labels, or None."""
        text = bytes(self.names_utf8.tolist()).decode(errors="surrogateescape")
        return json.loads(text) if text else None

    @names.setter
    def names(self, names: Sequence[str] | None) -> None:
        self.names_utf8 = _encode_names(names, self.num_classes).to(self.names_utf8.device)

    @torch.no_grad()
    def project_(self) -> "Proxies":
        """Normalize every proxy, for use after ``optimizer.step()`` (RegularFace)."""
        self.weight.copy_(l2_normalize(self.weight)[0])
        return self

    @torch.no_grad()
    def update_mean_(self, embeddings: Tensor, labels: Tensor, momentum: float = 0.9) -> "Proxies":
        """Move the proxies of the classes in a batch to the mean of their embeddings.

        ``ŵ_c ← momentum · ŵ_c + (1 − momentum) · mean_i x̂_i`` over the samples of class c,
        normalized. Samples with NaN or infinity are skipped. Call it after backward, for proxies
        without a gradient and with K = 1.
        """
        if self.proxies_per_class > 1:
            raise ValueError(f"update_mean_ needs one proxy per class, got {self.weight.shape[1]}")
        momentum = fraction("momentum", momentum)
        is_used = (labels >= 0) & embeddings.isfinite().all(1)
        x = l2_normalize(embeddings[is_used].to(self.weight.dtype))[0]
        classes, group, counts = torch.unique(
            labels[is_used], return_inverse=True, return_counts=True
        )
        means = add_rows_(x.new_zeros(len(classes), self.dim), group, x) / counts.unsqueeze(1)
        old = l2_normalize(self.weight[classes, 0])[0]
        self.weight[classes, 0] = l2_normalize(torch.lerp(means, old, momentum))[0]
        return self

    @torch.no_grad()
    def grow(
        self,
        new_classes: int | Sequence[str],
        *,
        optimizer: Optimizer | None,
        init: Init | Tensor | Sequence[Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> range:
        """Add classes after training and return their labels.

        New proxies have the mean length of the old ones. The weight becomes a new parameter.

        Args:
            new_classes: the number of new classes, or their names if the old classes have names.
            optimizer: the optimizer of the weight, in which the new parameter replaces the old one,
                with zero moments for the new classes. None if there is no optimizer yet.
            init: an initialization (default: the previous one), a tensor [new, K, D] (or [new, D]
                if K = 1), or for each new class a tensor [n, D] of example embeddings.
            generator: for random initializations.

        Examples:
            >>> from proximetry.losses import Proxies
            >>> proxies = Proxies(num_classes=2, dim=8, names=["crow", "jay"])
            >>> proxies.grow(["magpie"], optimizer=None)
            range(2, 3)
            >>> proxies.names, tuple(proxies.weight.shape)
            (['crow', 'jay', 'magpie'], (3, 1, 8))
        """
        names = self.names
        if isinstance(new_classes, Sequence) and not isinstance(new_classes, str):
            if names is None:
                raise ValueError("the old classes have no names. Set `names` first.")
            names += new_classes
            new_classes = len(new_classes)
        elif names is not None:
            raise ValueError("the old classes have names. Pass names of the new ones.")
        added = count("new_classes", new_classes)
        total = self.num_classes + added
        encoded = _encode_names(names, total)
        old, new = self.weight, self._new_proxies(added, init, generator)
        weight = nn.Parameter(torch.cat([old, new.to(old)]), old.requires_grad)
        if optimizer is not None:
            _replace_parameter(optimizer, old, weight)
        self.weight, self.names_utf8 = weight, encoded.to(old.device)
        return range(total - added, total)

    def _new_proxies(
        self,
        added: int,
        init: Init | Tensor | Sequence[Tensor] | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        shape = (added, self.proxies_per_class, self.dim)
        if init is None or isinstance(init, str):
            new = draw(shape, init or self.init, generator)
        elif isinstance(init, Tensor):
            new = init.unsqueeze(1) if init.ndim == 2 and shape[1] == 1 else init
            if tuple(new.shape) != shape:
                raise ValueError(f"init must have shape {list(shape)}, got {list(init.shape)}")
        else:
            if len(init) != added:
                got = len(init)
                raise ValueError(f"init must have one tensor per new class ({added}), got {got}")
            new = torch.stack([_cover(examples, *shape[1:], generator) for examples in init])
        directions = l2_normalize(new.float())[0]
        for valid, problem in (
            (torch.isfinite(new).all(2), "is not finite"),
            (directions.any(2), "has no direction: it is zero, or its examples cancel out"),
        ):
            if not valid.all():
                label = valid.all(1).tolist().index(False)
                raise ValueError(f"init of new class {label} {problem}")
        length = l2_normalize(self.weight.float())[1].mean()
        return directions.to(self.weight.device) * length

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        stored = state_dict.get(prefix + "names_utf8")
        if isinstance(stored, Tensor):  # the length depends on the names
            self.names_utf8 = torch.empty_like(stored, device=self.names_utf8.device)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Return shape and initialization, for ``print(loss)``."""
        classes, k, dim = self.num_classes, self.proxies_per_class, self.dim
        return f"num_classes={classes}, proxies_per_class={k}, dim={dim}, init={self.init!r}"


def parameter_groups(
    model: nn.Module,
    *losses: nn.Module,
    lr: float,
    proxy_lr_multiplier: float = 100.0,
    head_lr_multiplier: float = 1.0,
    layer_decay: float = 1.0,
    weight_decay: float | None = None,
    require_proxies: bool = True,
) -> list[dict[str, Any]]:
    """Return optimizer groups for a model and its losses, with a separate rate for proxies.

    Proxies need a much larger learning rate than the network, 100 times in the published recipes.
    The groups, without empty ones, are:

    - ``backbone`` at ``lr`` and ``head`` at ``lr · head_lr_multiplier``, frozen parameters
      included, if the model has ``parameter_parts()`` as the `Embedder` does; else ``model`` at
      ``lr``, with its trainable parameters;
    - with ``layer_decay``, instead of ``backbone``, a group for each of ``backbone_layers()``, at
      ``layer_decay`` times the rate of the layer after it;
    - ``proxies`` at ``lr · proxy_lr_multiplier``;
    - ``loss`` at ``lr``: other parameters of the losses, such as a learned temperature.

    Raises:
        ValueError: for duplicate parameters, and for missing proxies if ``require_proxies``.

    Examples:
        >>> import torch
        >>> from proximetry.losses import ProxyAnchor, parameter_groups
        >>> model, loss = torch.nn.Linear(8, 4), ProxyAnchor(num_classes=3, dim=4)
        >>> optimizer = torch.optim.AdamW(parameter_groups(model, loss, lr=1e-4))
        >>> [(group["name"], group["lr"]) for group in optimizer.param_groups]
        [('model', 0.0001), ('proxies', 0.01)]
    """
    lr = positive("lr", lr)
    for name, value, method in (
        ("head_lr_multiplier", head_lr_multiplier, "parameter_parts"),
        ("layer_decay", layer_decay, "backbone_layers"),
    ):
        if value != 1.0 and not hasattr(model, method):
            raise ValueError(f"{name} needs a model with {method}(), got {type(model).__name__}")
    rates = {
        "proxies": lr * positive("proxy_lr_multiplier", proxy_lr_multiplier),
        "head": lr * positive("head_lr_multiplier", head_lr_multiplier),
    }
    network: Any = model
    if hasattr(model, "parameter_parts"):
        members = dict(network.parameter_parts())
    else:
        members = {"model": [p for p in model.parameters() if p.requires_grad]}
    if layer_decay != 1.0:
        decay = fraction("layer_decay", positive("layer_decay", layer_decay))
        layers = {f"layer {n}": layer for n, layer in enumerate(network.backbone_layers())}
        rates |= {name: lr * decay**depth for depth, name in enumerate(reversed(layers))}
        members = dict(reversed(layers.items())) | members
        del members["backbone"]
    proxies = [m.weight for loss in losses for m in loss.modules() if isinstance(m, Proxies)]
    if require_proxies and not proxies:
        raise ValueError("the losses have no proxies. Pass the loss modules after the model.")
    proxy_set = set(proxies)
    others = [p for loss in losses for p in loss.parameters() if p not in proxy_set]
    for name, parameters in (("proxies", proxies), ("loss", others)):
        members[name] = [p for p in parameters if p.requires_grad]
    all_parameters = [p for parameters in members.values() for p in parameters]
    if len(set(all_parameters)) < len(all_parameters):
        raise ValueError("duplicate parameter. Pass the model and every loss once.")
    options = {}
    if weight_decay is not None:
        options["weight_decay"] = non_negative("weight_decay", weight_decay)
    return [
        {"name": name, "params": parameters, "lr": rates.get(name, lr), **options}
        for name, parameters in members.items()
        if parameters
    ]


def _cover(examples: Tensor, proxies: int, dim: int, generator: torch.Generator | None) -> Tensor:
    """Return ``proxies`` directions [K, D] that cover the examples [n, D] of one class."""
    if examples.ndim != 2 or examples.shape[1] != dim or examples.shape[0] == 0:
        raise ValueError(f"examples must be [n >= 1, {dim}], got {list(examples.shape)}")
    x = l2_normalize(examples.float())[0]
    centers = l2_normalize(x.mean(0, keepdim=True))[0]
    if proxies == 1:
        return centers
    # Spherical k-means with farthest-first initialization.
    while centers.shape[0] < proxies:
        farthest = (x @ centers.T).amax(1).argmin()
        centers = torch.cat([centers, x[farthest : farthest + 1]])
    for _ in range(10):
        nearest = (x @ centers.T).argmax(1)
        sums = add_rows_(torch.zeros_like(centers), nearest, x)
        used = torch.bincount(nearest, minlength=proxies).unsqueeze(1) > 0
        centers = torch.where(used, l2_normalize(sums)[0], centers)
    # Equal proxies of a class would have equal gradients and stay equal.
    noise = torch.randn(centers.shape, generator=generator).to(centers)
    return l2_normalize(centers + 0.01 * l2_normalize(noise)[0])[0]


def _replace_parameter(optimizer: Optimizer, old: Tensor, new: nn.Parameter) -> None:
    """Replace a parameter of the optimizer, with zero moments for the new rows."""
    if not any(p is old for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "the optimizer does not contain these proxies. Pass the optimizer of the loss."
        )
    for group in optimizer.param_groups:
        group["params"] = [new if p is old else p for p in group["params"]]
    state = optimizer.state.pop(old, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == old.shape:
            state[key] = torch.zeros_like(new, dtype=value.dtype)
            state[key][: len(old)] = value
    optimizer.state[new] = state


def _encode_names(names: Sequence[str] | None, num_classes: int) -> Tensor:
    """Validate names and return them as JSON bytes, empty for None."""
    if names is None:
        return torch.empty(0, dtype=torch.uint8)
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"class names must be a sequence of strings, got {names!r}")
    if len(names) != num_classes:
        raise ValueError(f"names must have {num_classes} entries, one per class; got {len(names)}")
    if len(set(names)) != len(names):
        raise ValueError(f"duplicate class name {Counter(names).most_common(1)[0][0]!r}")
    text = json.dumps(list(names), ensure_ascii=False)
    # Folder names may not be UTF-8.
    return torch.tensor(list(text.encode(errors="surrogateescape")), dtype=torch.uint8)
