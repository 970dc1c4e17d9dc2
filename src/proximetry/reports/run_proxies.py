"""The proxies of a run: separability of classes, and the number of proxies in use."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.formatting import join_first
from proximetry._util.tensors import l2_normalize
from proximetry.data import Catalog
from proximetry.models import Embedder
from proximetry.reports.run_record import RunRecord
from proximetry.training.checkpoint import read_part
from proximetry.training.evaluator import encode_catalog

TRAINING_IMAGES = 2000  # at most this number are compared with the proxies


@dataclass(frozen=True, eq=False)
class RunProxies:
    """The proxies of the selected epoch, or of the last one if those are gone.

    Attributes:
        epoch: of the checkpoint.
        names: of the classes.
        weight: the proxies, [classes, K, dimensions].
        is_selected: whether the epoch is the selected one.
    """

    epoch: int
    names: list[str]
    weight: Tensor
    is_selected: bool

    @property
    def per_class(self) -> int:
        """K."""
        return int(self.weight.shape[1])


def read_proxies(record: RunRecord) -> RunProxies | None:
    """Read the proxies of a run from the checkpoint of the selected epoch, else from the last.

    None for a run whose loss has no proxies.

    Raises:
        ValueError: if they cannot be read.
    """
    problems, candidates = list[str](), list[RunProxies]()
    for path in record.folder.checkpoints():
        try:
            state, tensors = read_part(path, "loss.proxies")
            epoch = int(state["state"]["epoch"])
            if "weight" not in tensors:
                return None  # a custom loss
            weight = tensors["weight"].float()
            if len(weight) < 2 or not bool(torch.isfinite(weight).all()):
                raise ValueError(f"the proxies in {path} are of one class, or not finite")
            text = bytes(tensors["names_utf8"].tolist()).decode(errors="surrogateescape")
            names = json.loads(text) if text else [str(number) for number in range(len(weight))]
            is_selected = epoch == record.selected.get("epoch")
            candidates.append(RunProxies(epoch, names, weight, is_selected))
        except (ValueError, LookupError, TypeError) as error:
            problems.append(str(error))
    if not candidates:
        raise ValueError(join_first(problems, 2) or "the checkpoints of the run are gone")
    return max(candidates, key=lambda one: (one.is_selected, one.epoch))


@dataclass(frozen=True, eq=False)
class ProxyUse:
    """The number of proxies per class that are nearest to some of its training images.

    Attributes:
        images, classes: number of compared images, and of all classes.
        nearest_proxies: by class, the number of proxies that are the nearest of at least one image.
        effective: by class, the exponential of the entropy of the images' nearest proxies: K if
            evenly distributed, 1 if all are nearest to one.
    """

    images: int
    classes: int
    nearest_proxies: npt.NDArray[np.int64]
    effective: npt.NDArray[np.float64]


def measure_use(proxies: RunProxies, embedder: Embedder, train: Catalog) -> ProxyUse:
    """Find the nearest proxy of training images of whole classes, sampled with seed 0.

    They have at most `TRAINING_IMAGES` images in all, but there is at least one class.

    Raises:
        ValueError: if the embedder is not that of the proxies.
    """
    if embedder.dim != proxies.weight.shape[2] or embedder.architecture.binary:
        raise ValueError("the embedder was changed after training, by PCA or for binary codes")
    if not proxies.is_selected:
        raise ValueError("the proxies of the selected epoch are gone")
    order = np.random.default_rng(0).permutation(len(train.class_names))
    images = np.bincount(train.codes, minlength=len(order))[order].cumsum()
    largest = order[: max(1, int((images <= TRAINING_IMAGES).sum()))]
    sample = train.subset(np.isin(train.codes, largest))
    vectors = l2_normalize(encode_catalog(embedder, sample).double())[0]
    numbers = {name: number for number, name in enumerate(proxies.names)}
    codes = np.array([numbers[label] for label in sample.labels])
    weight = l2_normalize(proxies.weight.double())[0]
    cosines = torch.einsum("nd,nkd->nk", vectors, weight[torch.from_numpy(codes)])
    nearest = cosines.argmax(1).numpy()
    counts = np.zeros((len(proxies.names), proxies.per_class))
    np.add.at(counts, (codes, nearest), 1)
    counts = counts[counts.sum(1) > 0]
    shares = counts / counts.sum(1, keepdims=True)
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(1)
    return ProxyUse(len(sample), len(train.class_names), (counts > 0).sum(1), np.exp(entropy))
