"""Parameter groups for an optimiser: backbone, head and proxies at their own learning rates."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from proximetry.losses import checks
from proximetry.losses.proxies import Proxies


def parameter_groups(
    model: nn.Module,
    *losses: nn.Module,
    lr: float,
    proxy_lr_multiplier: float = 100.0,
    head_lr_multiplier: float = 1.0,
    weight_decay: float | None = None,
    require_proxies: bool = True,
) -> list[dict[str, Any]]:
    """Optimiser groups for a model and its losses, with the proxies' own learning rate.

    Proxies are parameters of the loss, easily forgotten, and want a much larger learning rate than
    the network (100 times in the published recipes). The groups are, without empty ones:

    - ``backbone`` at ``lr`` and ``head`` at ``lr · head_lr_multiplier``, if the model has a method
      ``parameter_parts()`` that returns both lists, frozen parameters included, as the `Embedder`
      has; else ``model`` at ``lr``, with what is trainable now;
    - ``proxies`` at ``lr · proxy_lr_multiplier``;
    - ``loss`` at ``lr``: other parameters of the losses, such as a learned temperature.

    A parameter that would be given twice is refused, and so is a call without any proxies, unless
    ``require_proxies`` is False (for pair losses).
    """
    lr = checks.positive("lr", lr)
    rates = {
        "proxies": lr * checks.positive("proxy_lr_multiplier", proxy_lr_multiplier),
        "head": lr * checks.positive("head_lr_multiplier", head_lr_multiplier),
    }
    decay = {}
    if weight_decay is not None:
        decay["weight_decay"] = checks.non_negative("weight_decay", weight_decay)
    proxies = [m.weight for loss in losses for m in loss.modules() if isinstance(m, Proxies)]
    if require_proxies and not proxies:
        raise ValueError("none of the losses has proxies; pass the loss modules after the model")
    special = set(proxies)
    rest = [p for loss in losses for p in loss.parameters() if p not in special]
    find_parts = getattr(model, "parameter_parts", None)
    if find_parts is not None:
        parts = find_parts()
        members = {"backbone": parts["backbone"], "head": parts["head"]}
    elif head_lr_multiplier != 1.0:
        raise ValueError(
            "head_lr_multiplier needs a model that tells its head apart with parameter_parts(); "
            f"{type(model).__name__} does not"
        )
    else:
        members = {"model": _trainable(model.parameters())}
    members |= {"proxies": _trainable(proxies), "loss": _trainable(rest)}
    seen: list[nn.Parameter] = []
    for name, parameters in members.items():
        seen += parameters
        if len(set(seen)) < len(seen):
            raise ValueError(f"a parameter of group {name!r} was given twice")
    return [
        {"name": name, "params": parameters, "lr": rates.get(name, lr), **decay}
        for name, parameters in members.items()
        if parameters
    ]


def _trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad]
