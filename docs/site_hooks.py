"""What the site needs beyond mkdocs.yml.

Pages are read on the code host as well, where ``../benchmarks/README.md`` and ``docs/search.md``
lead somewhere. On the site README.md is the first page, what lies in docs/ stands at the root, and
any other file that a page links to comes along under its own path. A link to a file that is not
there stays as it is, for the strict build to find. Notebooks are pages like any other.
"""

import importlib
import inspect
import json
import operator
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# The target of a link or picture of Markdown, up to its anchor; what has a scheme is not ours.
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)\s#]+)")
FENCED = re.compile(r"(^ *```.*?^ *```)", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to, and those that these link to."""
    root = Path(config.docs_dir).parent
    added = ["README.md", "CHANGELOG.md"]
    waiting = [*added, *(f"docs/{page.src_uri}" for page in files.documentation_pages())]
    while waiting:
        page = waiting.pop()
        for target in LINK.findall("".join(FENCED.split((root / page).read_text("utf-8"))[::2])):
            found = follow(root, page, target)
            if found and not found.startswith("docs/") and found not in added:
                added.append(found)
                waiting += [found] if found.endswith(".md") else []
    for place in added:
        files.append(File.generated(config, site_path(place), abs_src_path=str(root / place)))
    return files


def on_page_read_source(page: Page, config: MkDocsConfig) -> str | None:
    """Read a notebook as Markdown: its texts, and its code in fences."""
    source = Path(page.file.abs_src_path or "")
    if source.suffix != ".ipynb":
        return None
    cells = json.loads(source.read_text("utf-8"))["cells"]
    parts = (("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells)
    return "\n\n".join(f"```python\n{text}\n```" if code else text for text, code in parts)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead where their files are on the site."""
    root = Path(config.docs_dir).parent
    here = Path(page.file.abs_src_path or "").relative_to(root).as_posix()

    def lead(match: re.Match[str]) -> str:
        found = follow(root, here, match[1])
        start = posixpath.dirname(page.file.src_uri) or "."
        return posixpath.relpath(site_path(found), start) if found else match[0]

    parts = FENCED.split(markdown)
    return "".join(part if n % 2 else LINK.sub(lead, part) for n, part in enumerate(parts))


def follow(root: Path, page: str, target: str) -> str | None:
    """Return the file of the repository to which a page links; of a folder it is the README.md."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if (root / found).is_dir():
        found = f"{found}/README.md"
    return found if not found.startswith("..") and (root / found).is_file() else None


def site_path(place: str) -> str:
    """Return where a file of the repository stands on the site."""
    place = re.sub(r"\.ipynb$", ".md", place)  # a notebook becomes a page
    return "index.md" if place == "README.md" else place.removeprefix("docs/")


class Declared(griffe.Extension):
    """Shows the signatures and settings that are made when the code runs.

    Losses make their constructors from the settings they declare, and `evaluate` takes the
    parameters of another function: both say so by ``__signature__``.
    """

    def on_class_instance(self, *, cls: griffe.Class, **_: Any) -> None:
        """Give a loss its constructor, and the meaning of its settings."""
        if cls.path.startswith("proximetry.losses.") and (own := running(cls)):
            init = griffe.Function("__init__", parameters=parameters(own.__signature__))
            cls.set_member("__init__", init)
            meaning = {name: one.help for name, one in own.settings().items()}
            if cls.docstring and meaning:
                lines = (f"    {name}: {words}" for name, words in meaning.items())
                cls.docstring.value += "\n\n" + "\n".join(("Args:", *lines))

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        """Give a function the parameters that it says it has."""
        told = func.decorators and func.path.startswith("proximetry.metrics.")
        if told and (own := running(func)):
            func.parameters = parameters(own.__signature__)


def running(declared: griffe.Object) -> Any:
    """Return the object of the running code if it has a signature of its own."""
    own = operator.attrgetter(declared.path.removeprefix(declared.module.path + "."))(
        importlib.import_module(declared.module.path)
    )
    return own if isinstance(getattr(own, "__signature__", None), inspect.Signature) else None


def parameters(signature: inspect.Signature) -> griffe.Parameters:
    """Return the parameters of a signature as griffe has them."""
    return griffe.Parameters(
        *(
            griffe.Parameter(
                one.name,
                annotation=inspect.formatannotation(one.annotation).strip("'"),  # some are quoted
                kind=griffe.ParameterKind(one.kind.description),
                default=None if one.default is one.empty else repr(one.default),
            )
            for one in signature.parameters.values()
        )
    )
