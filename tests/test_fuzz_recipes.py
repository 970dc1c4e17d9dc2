"""Recipes and options as nobody would write them: refused in a sentence, or read as they stand."""

import io
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
# What YAML, paths and numbers trip over.
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


def load(*arguments):
    """The recipe, or the sentence that refuses it; anything else is a failure."""
    try:
        return Recipe.load(*arguments), ""
    except RecipeError as error:
        return None, str(error)


def check(recipe, sentence):
    if recipe is None:
        assert 10 < len(sentence) < 3000
        sentence.encode()
    else:
        text = recipe.to_yaml()
        assert len(text) < 1_000_000
        assert Recipe.load(parse_yaml(text)) == recipe


@settings(max_examples=150)
@given(mutated_texts())
def test_mutated_recipes(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "mutated.yaml"
    file.write_bytes(content)
    recipe, sentence = load(file)
    check(recipe, sentence)
    if recipe is not None:  # read as PyYAML reads it
        plain = yaml.safe_load(content.decode())
        assert recipe == Recipe.load({"name": "mutated"} | plain)


@settings(max_examples=300)
@given(key=st.sampled_from(KEYS), value=VALUES)
def test_any_value_for_any_key(key, value):
    recipe, sentence = load({}, {key: value})
    check(recipe, sentence)
    if recipe is None:
        assert key.partition(".")[0] in sentence


@settings(max_examples=20)
@given(
    options=st.dictionaries(st.sampled_from(KEYS), WORDS | NUMBERS.map(str), max_size=3),
    flags=st.sampled_from([[], ["--fresh"], ["--model.flip-tta", "true"], ["--"], ["-x"], ["--k"]]),
)
def test_any_value_for_any_option(options, flags):
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
def test_long_files_are_read_or_refused_in_reasonable_time(tmp_path, piece):
    """Some of these take PyYAML minutes, or all the memory."""
    (tmp_path / "long.yaml").write_text(piece * (99_000 // len(piece)))
    recipe, sentence = load(tmp_path / "long.yaml")
    assert recipe is None
    assert "long.yaml" in sentence
