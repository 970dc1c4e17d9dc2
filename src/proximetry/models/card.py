"""Model card of an embedder: description, metrics, training details, preprocessing."""

from collections.abc import Iterator, Mapping
from math import isfinite
from numbers import Real
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from proximetry._util.errors import shorten, spaced
from proximetry.data.images import described_size
from proximetry.models.embedder import Embedder, versions

TASK = "image-feature-extraction"
_TAGS = ("embeddings", "image-retrieval", "metric-learning", "proximetry", "timm")
# Saved by `train` with the metrics.
_COUNTS = ("epoch", "queries", "queries_without_positive")
_PROTOCOLS = {
    "held_out": "The epoch was selected on classes held out of training, not on the test set.",
    "last": "The last epoch was used, without selection.",
    "paper": "The epoch was selected on the test set, as in many papers: its metrics are "
    "optimistic.",
}
_SPLITS = {"held_out": "classes held out of training", "test": "test set"}


def make_card(embedder: Embedder, repo_id: str, license: str | None) -> str:
    """Return the README.md of the embedder's repository."""
    results = [
        EvalResult(
            task_type=TASK,
            task_name="Image retrieval",
            dataset_type=_recipe(embedder, "data", "dataset") or "folder",
            dataset_name=_dataset(embedder),
            dataset_config=part or None,
            dataset_split=split or None,
            metric_type=metric,
            metric_name=metric,
            metric_value=value,
        )
        for split, part, metric, value in _figures(embedder.metrics or {})
    ]
    front = ModelCardData(
        license=license,
        library_name="proximetry",
        pipeline_tag=TASK,
        tags=list(_TAGS),
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    parts = (_use(embedder, repo_id), _evaluation(embedder), _training(embedder), _pixels(embedder))
    return f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(part for part in parts if part) + "\n"


def _figures(
    metrics: Mapping[str, Any], split: str = "", part: str = ""
) -> Iterator[tuple[str, str, str, float]]:
    """Yield split, part of the split, name and value of every metric."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            deeper = f"{part} {name}".strip() if split else ""
            yield from _figures(value, split or str(name), deeper)
        elif name in _COUNTS or isinstance(value, bool):
            continue
        elif isinstance(value, Real) and isfinite(value):
            yield split, part, str(name), float(value)


def _dataset(embedder: Embedder) -> str:
    name = _recipe(embedder, "data", "dataset")
    return "a folder of images" if name in ("", "folder") else name


def _recipe(embedder: Embedder, *keys: str) -> str:
    """Return a value of the recipe as text, "" if it is missing."""
    value: Any = embedder.recipe
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else _plain(value)


def _plain(value: object) -> str:
    """Return one line of text without markup, for a table."""
    words = " ".join(str(value).split())
    return shorten("".join(c for c in words if c not in "`|<>[]\\"), 200)


def _use(embedder: Embedder, repo_id: str) -> str:
    what = "images" if embedder.takes_images else str(embedder.preprocessing)
    inputs = '["one.jpg", "other.jpg"]' if embedder.takes_images else "arrays"
    classes = embedder.class_names
    trained = f", trained on {spaced(len(classes))} classes" if classes else ""
    codes = (
        f" Its signs are {embedder.bits}-bit codes for Hamming distance." if embedder.bits else ""
    )
    return f"""# {repo_id}

An embedder of {what}: {_plain(embedder.architecture.backbone)}, {embedder.dim} dimensions{trained}.

**Intended use**: retrieving {what} of the same class by {embedder.architecture.similarity} \
similarity. Evaluate it first on {what} that differ from its training data.{codes}

```python
from proximetry.models import Embedder

embedder = Embedder.from_hub("{repo_id}")
vectors = embedder.encode({inputs})
```

Command line: `proximetry evaluate hub:{repo_id} FOLDER`."""


def _evaluation(embedder: Embedder) -> str:
    metrics = embedder.metrics or {}
    rows = [
        f"| {_plain(_SPLITS.get(split, split))}{f', {_plain(part)}' if part else ''} "
        f"| {_plain(metric)} | {value:.4f} |"
        for split, part, metric, value in _figures(metrics)
    ]
    if not rows:
        return ""
    protocol = _PROTOCOLS.get(str(metrics.get("protocol")), "")
    intro = f"Measured on {_dataset(embedder)}; metrics are fractions. {protocol}".strip()
    head = ["## Evaluation", "", intro, "", "| images | metric | value |", "|---|---|---|"]
    return "\n".join([*head, *rows])


def _training(embedder: Embedder) -> str:
    made = embedder.architecture
    rows = {
        "backbone": _plain(made.backbone),
        "initial weights": _plain(embedder.weights.origin),
        "pooling": made.pooling,
        "dimensions": str(embedder.dim),
        "LayerNorm before the head": "yes" if made.layer_norm else "",
        "unit length": "yes" if made.normalize else "no",
        "flip test-time augmentation": "yes" if made.flip_tta else "no",
        "center crops of test-time augmentation": ", ".join(map(str, made.tta_crops)),
        "recipe": _recipe(embedder, "name"),
        "dataset": _dataset(embedder) if embedder.recipe else "",
        "loss": _recipe(embedder, "loss", "name"),
        "epochs": _recipe(embedder, "training", "epochs"),
        "seed": _recipe(embedder, "training", "seed"),
        "fingerprint": f"`{embedder.fingerprint()}`",
        "saved with": ", ".join(" ".join(pair) for pair in versions().items()),
    }
    recipe = "\n\nThe full recipe is in `embedder.json`." if embedder.recipe else ""
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value]
    return "\n".join(["## Training", "", "| network | |", "|---|---|", *lines]) + recipe


def _pixels(embedder: Embedder) -> str:
    wanted = embedder.preprocessing
    if not embedder.takes_images:
        return f"## Preprocessing\n\nNone: the input is float32 {wanted}."
    height, width = wanted.crop
    return f"""## Preprocessing

Resize to {described_size(wanted.resize)} pixels ({wanted.interpolation}), center crop \
{height} × {width}, {wanted.channels} × {wanted.scale:.6g}, mean {list(wanted.mean)}, std \
{list(wanted.std)}. `encode` does all of it; ONNX files of `proximetry export` do all but resizing \
and cropping."""
