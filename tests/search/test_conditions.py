"""Filters: operators, types, null values, the text form of the command line."""

import datetime
import operator

import numpy as np
import pytest

from proximetry._util.errors import UsageError
from proximetry.search import metadata
from proximetry.search.conditions import parse_conditions, parse_where

COLUMNS = {
    "path": ["/a/1.jpg", "/a/2.jpg", "/b/3.jpg", "/b/\udce9.jpg", "/c/5.jpg"],
    "label": ["jay", "crow", None, "jay", "wren"],
    "year": [1999, 2004, None, 2005, 2**60 + 1],
    "score_a": [0.5, float("nan"), 1.5, None, -1.0],
    "day": ["2024-01-31", "2024-02-01", "2025-01-01", None, "2023-12-31"],
    "taken": [datetime.date(2024, 1, day) for day in (1, 2, 3, 4, 5)],
    "good": [True, False, None, True, False],
    "empty": [None] * 5,
}


@pytest.fixture(scope="module")
def table():
    return metadata.from_columns(COLUMNS)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"year": {">=": 1999, "<": 2005}}, [0, 1]),
        ({"year": {">": 2004.5}}, [3, 4]),
        ({"year": {">": 2**60}}, [4]),
        ({"year": {"<": 10**30}}, [0, 1, 3, 4]),
        ({"year": {"<=": "2004"}}, [0, 1]),
        ({"year": {"<": "2004.5"}}, [0, 1]),
        ({"year": {"<": float("inf")}}, [0, 1, 3, 4]),
        ({"score_a": {"<": 10**400}}, [0, 2, 4]),
        ({"score_a": {">": -(10**400)}}, [0, 2, 4]),
        ({"year": {">=": np.int64(2005)}}, [3, 4]),
        ({"year": {"!=": [1999, 2005]}}, [1, 2, 4]),
        ({"year": {"!=": None}}, [0, 1, 3, 4]),
        ({"year": [None, 1999]}, [0, 2]),
        ({"score_a": {"<": 1}}, [0, 4]),
        ({"label": {"!=": ["jay", "crow"]}}, [2, 4]),
        ({"label": {"!=": "jay"}, "path": {"^=": ["/a/", "/c"]}}, [1, 4]),
        ({"label": {"^=": "j", "!=": "jab"}}, [0, 3]),
        ({"path": {"^=": "/b/\udce9"}}, [3]),
        ({"day": {">=": "2024", "<": "2025"}}, [0, 1]),
        ({"taken": {">": datetime.date(2024, 1, 3)}}, [3, 4]),
        ({"taken": {"<": "2024-01-02"}}, [0]),
        ({"good": {"!=": True}}, [1, 2, 4]),
        ({"empty": {"!=": 3}, "label": "jay"}, [0, 3]),
        ({"empty": None}, [0, 1, 2, 3, 4]),
    ],
)
def test_where_operators(table, where, expected):
    assert np.flatnonzero(metadata.select(table, where)).tolist() == expected


@pytest.mark.parametrize("sign", ["<", "<=", ">", ">="])
@pytest.mark.parametrize("column", ["year", "score_a", "day"])
def test_ranges_compare_like_python(table, sign, column):
    compare = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[sign]
    for bound in COLUMNS[column]:
        if bound is None or bound != bound:
            continue
        expected = [one is not None and compare(one, bound) for one in COLUMNS[column]]
        if any(expected):
            assert metadata.select(table, {column: {sign: bound}}).tolist() == expected


@pytest.mark.parametrize(
    ("where", "token"),
    [
        ({"yaer": 3}, "did you mean 'year'"),
        ({"year": {">=": "soon"}}, "has type int64, got 'soon'"),
        ({"year": {">=": True}}, "has type int64"),
        ({"year": {">=": None}}, "needs one value"),
        ({"year": {">=": [1, 2]}}, "needs one value"),
        ({"year": {"=>": 3}}, "unknown operator '=>'"),
        ({"year": {}}, "no value for year"),
        ({"year": {"=": []}}, "no value for year"),
        ({"year": {"^=": "19"}}, "\\^= needs text"),
        ({"year": {">": 2**62}}, "no image has year > "),
        ({"label": {"^=": 3}}, "\\^= needs text"),
        ({"label": {">": 3}}, "has type text, got 3"),
        ({"label": "joy"}, "did you mean 'jay'"),
        ({"label": "\ud800"}, r"label = needs text, got '\\ud800'"),
        ({"label": {"^=": ["j", "\ud800"]}}, "label \\^= needs text"),
        ({"year": 1800}, "no image has year 1800$"),
        ({"path": None}, "no image has path None$"),
        ({"label": {"^=": "q"}}, "no image has label \\^= 'q'"),
        ({"good": {">": False}}, "has type bool"),
        ({"taken": {">": "soon"}}, "has type date32.*, got 'soon'"),
        ({"empty": {">": 3}}, "no image has empty > 3"),
    ],
)
def test_invalid_where(table, where, token):
    with pytest.raises(UsageError, match=token):
        metadata.select(table, where)


def test_hidden_columns_are_unknown(table):
    stored = metadata.with_files(table, [None] * 5, [None] * 5)
    for column in ("_size", "siez"):
        with pytest.raises(UsageError, match="has no column") as caught:
            metadata.select(stored, {column: 3})
        assert "good, empty." in str(caught.value)
        assert metadata.DIGEST not in str(caught.value)


def test_parse_conditions():
    assert parse_conditions(["label=jay", "label=a>b", "day="]) == {
        "label": ["jay", "a>b"],
        "day": [""],
    }
    text = ["year>=1999", "year<2005", "label!=jay", "label!=crow", "path^=/a/", "path=x"]
    assert parse_conditions(text) == {
        "year": {">=": "1999", "<": "2005"},
        "label": {"!=": ["jay", "crow"]},
        "path": {"^=": ["/a/"], "=": ["x"]},
    }
    first = parse_where({"year": {">=": 1999, "!=": [2000, 2001]}}, ["year"])
    assert [(one.operator, one.values) for one in first] == [(">=", (1999,)), ("!=", (2000, 2001))]
    for invalid in ("label", "=jay", ">=3", ""):
        with pytest.raises(UsageError, match="COLUMN=VALUE"):
            parse_conditions([invalid])
    with pytest.raises(UsageError, match="two values of year >="):
        parse_conditions(["year>=1", "year>=2"])
