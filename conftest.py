"""The code in README.md, docs/ and docstrings is executed as tests, each file in one namespace.

With several processes (pytest -n) a page must stay in one of them: --dist loadfile.
"""

from sybil import Sybil
from sybil.document import PythonDocStringDocument
from sybil.parsers.markdown import PythonCodeBlockParser
from sybil.parsers.rest import DocTestParser

pages = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
)
docstrings = Sybil(
    parsers=[DocTestParser()],
    path="src",
    patterns=["*.py"],
    document_types={".py": PythonDocStringDocument},
)
pytest_collect_file = (pages + docstrings).pytest()
