"""The code in README.md and docs/ is executed as tests, each file in one namespace.

With several processes (pytest -n) a page must stay in one of them: --dist loadfile.
"""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
).pytest()
