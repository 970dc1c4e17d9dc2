"""Fill in the parts of the documentation that the code declares.

    python docs/generate.py            write them
    python docs/generate.py --check    only list outdated pages

A part is between ``<!-- generated: NAME ARGUMENTS -->`` and ``<!-- end -->``; NAME is a key of
`PARTS`.
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from proximetry._util.formatting import format_int
from proximetry.data.datasets import list_datasets
from proximetry.losses import LOSSES, PAIR_LOSSES, ProxyLoss, Setting, loss_settings
from proximetry.losses.pairs import USE
from proximetry.recipe import loading
from proximetry.recipe import schema as recipe

DOCS = Path(__file__).parent
PART = re.compile(r"(<!-- generated: (\w+) ?([^>]*?) -->\n).*?(<!-- end -->)", re.DOTALL)

SIMILARITIES = {
    "single": "one proxy",
    "soft": "soft mean of K proxies",
    "max": "one proxy, or the nearest of K",
    "mean": "mean of K proxies",
}
JOINS = {
    "separate": "separate, log(1 + Σ)",
    "joint": "joint, log(1 + Σ)",
    "softmax": "softmax",
    "nca": "softmax, positive excluded from the sum",
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def value(default: Any) -> str:
    """Return a default as Python writes it, 1/9 as a fraction."""
    if isinstance(default, float):
        fraction = Fraction(default).limit_denominator(100)
        if len(repr(default)) > 8 and float(fraction) == default:
            return str(fraction)
    return f'"{default}"' if isinstance(default, str) else repr(default)


def specific_settings(cls: type[ProxyLoss]) -> dict[str, Setting]:
    """Return the settings of a loss without those of all losses."""
    shared = ProxyLoss.settings()
    return {name: entry for name, entry in cls.settings().items() if name not in shared}


def signature(name: str) -> str:
    """Return the call of a loss, with its defaults; the shared settings are "…"."""
    words = []
    for parameter in inspect.signature(LOSSES[name]).parameters.values():
        if parameter.name in ProxyLoss.settings():
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        required = parameter.default is parameter.empty
        words.append(parameter.name + ("" if required else f"={value(parameter.default)}"))
    words += ["…"] if "*" in words else ["*", "…"]
    return f"`{LOSSES[name].__name__}({', '.join(words)})`, in recipes `{name}`"


def settings_table(declared: dict[str, Setting]) -> str:
    """Return the table of settings."""
    rows = [
        (f"`{name}`", entry.check.kind, f"`{value(entry.default)}`", entry.help)
        for name, entry in declared.items()
    ]
    return table(("setting", "type", "default", "meaning"), rows)


def settings(name: str) -> str:
    """Return the table of the settings of a loss, its form, and its initial proxies."""
    cls = LOSSES[name]
    return (
        f"{settings_table(specific_settings(cls))}\n\n"
        "The [settings of all losses](README.md#settings-of-all-losses) are keyword-only. "
        f"Form: `{form(cls)}`. Initial proxies: [`{cls.default_init}`](proxies.md#initialization)."
    )


def own_settings(name: str) -> str:
    """Return the settings of a loss without those that a page with several losses names once."""
    declared = specific_settings(LOSSES[name])
    return settings_table({key: one for key, one in declared.items() if key not in COMMON})


def shared_settings() -> str:
    """Return the table of the settings of all losses."""
    return settings_table(ProxyLoss.settings())


def form(cls: type[ProxyLoss]) -> str:
    """Return the form of a loss as its class writes it."""
    choices = f'"{cls.form.similarity}", by="{cls.form.by}", join="{cls.form.join}"'
    adjust = "" if cls.form.adjust is None else f", adjust={cls.form.adjust.__name__}"
    return f"LossForm({choices}{adjust})"


def logit(cls: type[ProxyLoss], method: str) -> str:
    """Return the formula of a logit."""
    if getattr(cls, method) is ProxyLoss.positive_logit:  # no margin
        method = "negative_logit"
    text = documented_formula(getattr(cls, method))
    if cls.form.adjust is not None and method == "negative_logit":
        text += f", φ(S) = {documented_formula(cls.form.adjust)}"
    return text


def documented_formula(function: Callable[..., object]) -> str:
    """Return the formula at the beginning of a docstring."""
    first = (inspect.getdoc(function) or "").splitlines()[0]
    first = re.sub("^Return (scale and offset of )?", "", first)
    return re.split(r"[:.](?:\s|$)", first)[0]


def use(name: str) -> str:
    """Return when to use a loss."""
    return USE if name == "pairs" else LOSSES[name].use


def losses() -> str:
    """Return the table of all losses."""
    head = "loss", "class", "similarity S", "positive logit", "negative logit"
    rows = [
        (
            link(name),
            f"`{cls.__name__}`",
            SIMILARITIES[cls.form.similarity],
            logit(cls, "positive_logit"),
            logit(cls, "negative_logit"),
            cls.form.by,
            "separate, Σ log(1 + e^z)" if cls.form.by == "entry" else JOINS[cls.form.join],
        )
        for name, cls in package_losses()
    ]
    return table((*head, "grouped by", "join"), rows)


def pair_losses() -> str:
    """Return the table of the pair losses."""
    rows = [
        (
            f"`{name}`",
            (inspect.getdoc(make) or "").rstrip("."),
            _defaults(loss_settings(f"pairs/{name}")),
        )
        for name, make in PAIR_LOSSES.items()
    ]
    return table(("name", "paper and miner", "settings"), rows)


def _defaults(declared: dict[str, Setting]) -> str:
    listed = {key: one for key, one in declared.items() if key != "memory"}
    words = [f"`{key}={value(one.default)}`: {one.help}" for key, one in listed.items()]
    return "; ".join(words) or "–"


def package_losses() -> list[tuple[str, type[ProxyLoss]]]:
    """Return the losses of the package, without registered custom ones."""
    return [(n, cls) for n, cls in LOSSES.items() if cls.__module__.startswith("proximetry.")]


def link(name: str) -> str:
    """Return a link to the page of a loss or its section, with the heading up to a colon."""
    for page in sorted((DOCS / "losses").glob("*.md")):
        before, marker, _ = page.read_text(encoding="utf-8").partition(
            f"<!-- generated: signature {name} -->"
        )
        if marker:
            level, _, heading = re.findall("^#+ .*", before, re.MULTILINE)[-1].partition(" ")
            anchor = (
                "" if level == "#" else "#" + re.sub(r"[^\w]+", "-", heading.lower()).strip("-")
            )
            return f"[{heading.partition(':')[0]}]({page.name}{anchor})"
    raise SystemExit(f"the loss {name!r} has no page: write {DOCS / 'losses' / name}.md")


def recipe_keys(section: str) -> str:
    """Return the table of the keys of a section of the recipe."""
    rows = []
    for key, field in recipe.recipe_keys():
        if key.partition(".")[0] != section:
            continue
        if dataclasses.is_dataclass(field.annotation):
            for inner in dataclasses.fields(field.annotation):
                rows.append(
                    (f"`{key}.{inner.name}`", default(inner.default), inner.metadata["help"])
                )
        else:
            choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
            listed = f" ({', '.join(f'`{choice}`' for choice in choices)})" if choices else ""
            rows.append((f"`{key}`", default(field.default), f"{field.description}{listed}"))
    return table(("key", "default", "meaning"), rows)


def recipes() -> str:
    """Return the table of the shipped recipes; recipes for several datasets share a row."""
    names: dict[str, list[str]] = {}
    for name in loading.shipped_recipes():
        names.setdefault(loading.plain_values(name)["about"], []).append(f"`{name}`")
    return table(("recipes", "about"), ((", ".join(same), about) for about, same in names.items()))


def datasets() -> str:
    """Return the table of the datasets with published sizes."""
    rows = []
    for info in list_datasets().values():
        if info.train and info.test:
            train, test = (
                f"{format_int(size.classes)} classes, {format_int(size.images)} images"
                for size in (info.train, info.test)
            )
            if info.query and info.gallery:
                queries, gallery = map(format_int, (info.query.images, info.gallery.images))
                test += f" ({queries} queries, {gallery} in the gallery)"
            rows.append((f"`{info.name}`", info.title, train, test))
    return table(("name", "dataset", "training", "test"), rows)


def default(value: Any) -> str:
    """Return a default as YAML writes it."""
    if value in (None, ""):
        return "–"
    plain = list(value) if isinstance(value, tuple) else value
    return f"`{json.dumps(plain) if isinstance(plain, bool | list | dict) else plain}`"


#: Settings that most losses have.
COMMON = ("label_smoothing", "proxies_per_class")

PARTS: dict[str, Callable[..., str]] = {
    "datasets": datasets,
    "recipe_keys": recipe_keys,
    "recipes": recipes,
    "signature": signature,
    "settings": settings,
    "own_settings": own_settings,
    "shared_settings": shared_settings,
    "use": use,
    "losses": losses,
    "pair_losses": pair_losses,
}


def fill_parts(text: str) -> str:
    """Return the text of a page with its parts generated again."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{PARTS[match[2]](*match[3].split())}\n{match[4]}"

    return PART.sub(fill, text)


def outdated_pages() -> dict[Path, str]:
    """Return the outdated pages, with their new text."""
    pages = {page: page.read_text(encoding="utf-8") for page in sorted(DOCS.rglob("*.md"))}
    return {page: new for page, text in pages.items() if (new := fill_parts(text)) != text}


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description="Fill in the generated parts of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if out of date")
    check = parser.parse_args().check
    pages = outdated_pages()
    for page, text in pages.items():
        print(f"{'out of date' if check else 'written'}: {page.relative_to(DOCS.parent)}")
        if not check:
            page.write_text(text, encoding="utf-8")
    if check and pages:
        sys.exit("run: python docs/generate.py")


if __name__ == "__main__":
    main()
