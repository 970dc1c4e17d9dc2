"""The proxies of a run: separability of classes, and the number of proxies in use."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from proximetry._util.tensors import l2_normalize
from proximetry.data import Catalog
from proximetry.models import Embedder
from proximetry.reports.run_record import RunRecord
from proximetry.training.checkpoint import read_part
from proximetry.training.evaluator import encode_catalog

MAX_IMAGES = 2000  # training images that are compared with the proxies


@dataclass(frozen=True, eq=False)
class RunProxies:
    """The proxies of a checkpoint.

    Attributes:
        epoch: epoch of the checkpoint.
        names: names of the classes.
        weight: the proxies, [classes, K, dimensions].
    """

    epoch: int
    names: list[str]
    weight: Tensor

    @property
    def per_class(self) -> int:
        """K."""
        return int(self.weight.shape[1])


def read_proxies(record: RunRecord) -> RunProxies | None:
    """Read the proxies of the saved epoch of a run; return None if its loss has none.

    Raises:
        ValueError: if the checkpoint is missing or damaged, or the proxies are sharded.
    """
    folder = record.folder
    # A run that selects no epoch has only the last checkpoint.
    path = folder.best if folder.best.exists() else folder.last
    state, tensors = read_part(path, "loss.proxies")
    if state.get("shards"):
        raise ValueError(f"reports do not support sharded proxies: {path}")
    if "weight" not in tensors:
        return None  # a custom loss
    text = bytes(tensors["names_utf8"].tolist()).decode(errors="surrogateescape")
    names = json.loads(text) if text else [str(number) for number in range(len(tensors["weight"]))]
    return RunProxies(state["state"]["epoch"], names, tensors["weight"].float())


@dataclass(frozen=True, eq=False)
class ProxyUse:
    """The number of proxies per class that are nearest to at least one of its training images.

    Attributes:
        images: number of compared images.
        classes: number of all classes.
        nearest_proxies: by class, the number of proxies that are nearest to at least one image.
        effective: by class, the exponential of the entropy of the nearest proxies: K if images are
            evenly distributed, 1 if all are nearest to the same proxy.
    """

    images: int
    classes: int
    nearest_proxies: npt.NDArray[np.int64]
    effective: npt.NDArray[np.float64]


def measure_use(proxies: RunProxies, embedder: Embedder, train: Catalog) -> ProxyUse:
    """Find the nearest proxy of each training image of a sample of classes (seed 0).

    The sample has at most `MAX_IMAGES` images, but at least one class.

    Raises:
        ValueError: if the embedder does not belong to the proxies.
    """
    if embedder.dim != proxies.weight.shape[2] or embedder.architecture.binary:
        raise ValueError("the embedder was changed after training, by PCA or for binary codes")
    order = np.random.default_rng(0).permutation(len(train.class_names))
    images = np.bincount(train.codes, minlength=len(order))[order].cumsum()
    classes = order[: max(1, int((images <= MAX_IMAGES).sum()))]
    sample = train.subset(np.isin(train.codes, classes))
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
