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
_TAGS = ["embeddings", "image-retrieval", "metric-learning", "proximetry", "timm"]
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
    name = _recipe(embedder, "data", "dataset")
    dataset = "a folder of images" if name in ("", "folder") else name
    metrics = embedder.metrics or {}
    figures = list(_figures(metrics))
    results = [
        EvalResult(
            task_type=TASK,
            task_name="Image retrieval",
            dataset_type=name or "folder",
            dataset_name=dataset,
            dataset_config=part or None,
            dataset_split=split or None,
            metric_type=metric,
            metric_name=metric,
            metric_value=value,
        )
        for split, part, metric, value in figures
    ]
    front = ModelCardData(
        license=license,
        library_name="proximetry",
        pipeline_tag=TASK,
        tags=_TAGS,
        model_name=repo_id.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )
    parts = [_usage(embedder, repo_id)]
    if figures:
        protocol = _PROTOCOLS.get(str(metrics.get("protocol")), "")
        parts.append(
            f"## Evaluation\n\nMeasured on {dataset}; metrics are fractions. {protocol}".rstrip()
            + "\n\n| images | metric | value |\n|---|---|---|"
        )
        for split, part, metric, value in figures:
            images = ", ".join(filter(None, (_SPLITS.get(split, split), part)))
            parts[-1] += f"\n| {_plain(images)} | {_plain(metric)} | {value:.4f} |"
    parts += [_training(embedder, dataset), _preprocessing(embedder)]
    return f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"


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


def _usage(embedder: Embedder, repo_id: str) -> str:
    what = "images" if embedder.takes_images else str(embedder.preprocessing)
    inputs = '["one.jpg", "other.jpg"]' if embedder.takes_images else "arrays"
    classes = embedder.class_names
    trained = f", trained on {spaced(len(classes))} classes" if classes else ""
    bits = embedder.bits
    codes = f" Its signs are {bits}-bit codes for Hamming distance." if bits else ""
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


def _training(embedder: Embedder, dataset: str) -> str:
    settings = embedder.architecture.to_json()
    rows = {
        **{name: value for name, value in settings.items() if value is not False},
        "dim": embedder.dim,
        "initial weights": embedder.weights.origin,
        "recipe": _recipe(embedder, "name"),
        "dataset": dataset if embedder.recipe else "",
        "loss": _recipe(embedder, "loss", "name"),
        "epochs": _recipe(embedder, "training", "epochs"),
        "seed": _recipe(embedder, "training", "seed"),
        "fingerprint": embedder.fingerprint(),
        "saved with": ", ".join(" ".join(pair) for pair in versions().items()),
    }
    lines = [f"| {name} | {_plain(value)} |" for name, value in rows.items() if value != ""]
    recipe = ["\nThe full recipe is in `embedder.json`."] if embedder.recipe else []
    return "\n".join(["## Training", "", "| network | |", "|---|---|", *lines, *recipe])


def _preprocessing(embedder: Embedder) -> str:
    pixels = embedder.preprocessing
    if not embedder.takes_images:
        return f"## Preprocessing\n\nNone: the input is float32 {pixels}."
    return f"""## Preprocessing

Resize to {described_size(pixels.resize)} pixels ({pixels.interpolation}), center crop \
{pixels.crop[0]} × {pixels.crop[1]}, {pixels.channels} × {pixels.scale:.6g}, mean \
{list(pixels.mean)}, std {list(pixels.std)}. `encode` does all of it; ONNX files of \
`proximetry export` do all but resizing and cropping."""
