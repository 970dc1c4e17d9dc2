"""The code in README.md and docs/ is executed as tests, each file in one namespace."""

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the code of a page in one process: what follows stands on what came before."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
