"""The code in README.md, docs/ and docstrings is executed as tests, each file in one namespace.

With several processes (pytest -n) a page must stay in one of them: --dist loadfile.
"""

from contextlib import chdir

import pytest
from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser


@pytest.fixture(scope="module")
def working_folder(tmp_path_factory):
    """Run the examples of a module in a temporary folder."""
    with chdir(tmp_path_factory.mktemp("docstrings")):
        yield


pages = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
)
docstrings = Sybil(
    parsers=[DocTestParser()],
    path="src",
    patterns=["*.py"],
    document_types={".py": PythonDocStringDocument},
    fixtures=["working_folder"],
)
pytest_collect_file = (pages + docstrings).pytest()
