"""Fuzz recipes and options: an error message of one line, or the recipe as PyYAML reads it."""

import io
import re
from contextlib import redirect_stderr, redirect_stdout

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proximetry import cli
from proximetry.recipe.loading import parse_yaml
from proximetry.recipe.schema import recipe_keys
from proximetry.training import Recipe, RecipeError, shipped_recipes

TEXTS = [path.read_bytes() for path in shipped_recipes().values()]
# Pieces that are difficult in YAML, paths and numbers.
PIECES = st.sampled_from(
    [
        *"[]{}&*!|>'\"%@`#,?:-~\n\t\r\0 ",
        *(": ", "- ", "? ", "<<: ", "&a ", "*a", "--- ", "...", "!!int ", "!!timestamp "),
        *("1e999", "-0", ".nan", ".inf", "0x", "0b2", "1_0", "1:60", "2001-99-99", "~", "null"),
        *("9" * 5000, "x" * 500, "[" * 60, "a." * 30, "é", "\ufeff", "\x85", "\u2028", "😀"),
        *("name: ", "model.dim: ", "data: {", "base: ", "base: default\n", "loss: {settings: {"),
    ]
)
KEYS = [*dict(recipe_keys()), "loss.settings.alpha", "evaluation.metrics.recall_at"]
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**12, 10**100, 2**63, 1e-300, -0.0])
WORDS = st.text(max_size=30) | PIECES
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated_texts(draw):
    text = bytearray(draw(st.sampled_from(TEXTS)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.integers(at, min(len(text), at + 40)))
        match draw(st.sampled_from(["flip", "insert", "delete", "repeat", "cut"])):
            case "flip" if at < len(text):
                text[at] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                text[at:at] = draw(PIECES).encode()
            case "delete":
                del text[at:end]
            case "repeat":
                text[at:at] = text[at:end]
            case "cut":
                del text[at:]
    return bytes(text)


class Yaml12Loader(yaml.SafeLoader):
    """PyYAML with numbers such as 1e-4."""


Yaml12Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[\d.]+[eE][-+]?\d+$"), list("-+.0123456789")
)


def load(*arguments):
    """Return the recipe, or the error message; any other error fails."""
    try:
        return Recipe.load(*arguments), ""
    except RecipeError as error:
        return None, str(error)


def check(recipe, message):
    if recipe is None:
        assert 10 < len(message) < 3000
        message.encode()
    else:
        text = recipe.to_yaml()
        assert len(text) < 1_000_000
        assert Recipe.load(parse_yaml(text)) == recipe


@settings(max_examples=150)
@given(mutated_texts())
def test_mutated_recipes(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "mutated.yaml"
    file.write_bytes(content)
    recipe, message = load(file)
    check(recipe, message)
    if recipe is not None:  # read as PyYAML reads it
        plain = yaml.load(content.decode(), Yaml12Loader)
        assert recipe == Recipe.load({"name": "mutated"} | plain)


@settings(max_examples=300)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_random_values_of_random_keys(key, value):
    recipe, message = load({}, {key: value})
    check(recipe, message)
    if recipe is None:
        assert key.partition(".")[0] in message


@settings(max_examples=20)
@given(
    options=st.dictionaries(st.sampled_from(KEYS), WORDS | NUMBERS.map(str), max_size=3),
    flags=st.sampled_from([[], ["--fresh"], ["--model.flip-tta", "true"], ["--"], ["-x"], ["--k"]]),
)
def test_random_values_of_random_options(options, flags):
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(["train", "glyphs", "out", "--print-config", *words, *flags])
    if code == 0:
        assert Recipe.load(parse_yaml(out.getvalue())).data.dataset
    else:
        assert code == 2, err.getvalue()
        assert len(err.getvalue()) < 3000
        assert err.getvalue().count("\n") == 1
        assert err.getvalue().startswith("proximetry: ")


@pytest.mark.parametrize("piece", ["[", "{a: ", "&a ", "- - a\n"])
def test_long_files_are_rejected_in_reasonable_time(tmp_path, piece):
    (tmp_path / "long.yaml").write_text(piece * (99_000 // len(piece)))
    recipe, message = load(tmp_path / "long.yaml")
    assert recipe is None
    assert "long.yaml" in message
