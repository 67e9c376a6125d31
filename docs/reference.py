"""Write the tables of names in reference.md; for the site, write a page of each name.

python docs/reference.py
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import kvframe_engine.contract

import kvframe
from kvframe import contract
from kvframe.contract.hookspecs import HookSpecs

FOLDER = Path(__file__).parent
PAGE = FOLDER / "reference.md"
START, END = "<!-- names: start -->\n", "<!-- names: end -->\n"

_OF_USERS: Mapping[str, tuple[str, ...]] = {
    "Run models": ("engine", "config", "cache.hints"),
    "Plan a cache": ("planning", "builtin"),
    "Manage a cache": ("cache",),
    "Host models in an engine of your own": ("hosting", "attention", "selection"),
    "Load plugins": ("loading", "contract"),
}
"""The names of ``kvframe``, by packages that define them; the first that fits has a name."""

_OF_PLUGINS: Mapping[str, tuple[str, ...]] = {
    "Hooks": ("hookspecs",),
    "Cache specs and layers": ("specs",),
    "Fields of specs": ("fields",),
    "Masks": ("masks",),
    "Formats": ("formats",),
    "Batch metadata": ("metadata",),
    "Wrappers": ("wrapper",),
    "Backends and builders": ("backend", "choice", "entries", "capabilities"),
    "The order of requests": ("order",),
    "Ranges of prompts": ("ranges",),
    "Slots": ("slots",),
    "Merging parts of the keys": ("merging",),
    "Relative bias": ("relative_bias",),
    "Graph capture": ("capture",),
    "State layers": ("state",),
    "Eviction": ("eviction",),
    "Event publishers": ("event_publisher",),
    "Page stores": ("page_store", "sizes"),
    "Model descriptions": ("description",),
    "Model adapters": ("model",),
    "Errors": ("errors",),
}
"""The names of ``kvframe.contract``, by modules that define them."""

_OF_ENGINE: Mapping[str, tuple[str, ...]] = {
    "Scheduling": ("scheduling",),
    "Proposers": ("proposer",),
    "Logits processors": ("logits",),
    "Errors of an engine": ("errors",),
}
"""The names of ``kvframe_engine.contract``, likewise."""

_TABLES = {kvframe: _OF_USERS, contract: _OF_PLUGINS, kvframe_engine.contract: _OF_ENGINE}


@attrs.frozen
class Name:
    """A name of the API.

    Attributes:
        name: The name.
        package: Where users import it from.
        module: The module that defines it.
    """

    name: str
    package: str
    module: str

    @property
    def source(self) -> str:
        """The file that defines it, from this folder."""
        path = Path(inspect.getsourcefile(__import__(self.module, fromlist=["_"])) or "").resolve()
        return f"../{path.relative_to(FOLDER.resolve().parent).as_posix()}"

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return _docstrings(FOLDER / self.source)[self.name].split("\n")[0].replace("``", "`").replace("|", "\\|")

    @property
    def directive(self) -> str:
        """The directive of autodoc that documents it."""
        value = self._value
        if inspect.isclass(value):
            return "autoexception" if issubclass(value, BaseException) else "autoclass"
        return "autofunction" if inspect.isfunction(value) else "autodata"

    @property
    def options(self) -> list[str]:
        """The options of the directive."""
        if not inspect.isclass(self._value):
            return []
        return ["members", "show-inheritance"] if self._value.__bases__ != (object,) else ["members"]

    @property
    def _value(self) -> Any:
        return getattr(__import__(self.module, fromlist=["_"]), self.name)


def find_names() -> dict[str, list[Name]]:
    """Return every name of the API once, by the heading of its table."""
    headings: dict[str, list[Name]] = {heading: [] for tables in _TABLES.values() for heading in tables}
    for package, of_package in _TABLES.items():
        exported = [each for each in _exported(package) if package is not kvframe or each[1] not in dir(contract)]
        for heading, starts in of_package.items():
            for start in starts:
                listed = [each for each in exported if f"{each[0]}.".startswith(f"{start}.")]
                exported = [each for each in exported if each not in listed]
                headings[heading] += [_defined(package.__name__, module, name) for module, name in listed]
        assert not exported, f"no heading has {exported}"
    headings["Hooks"].insert(0, Name(HookSpecs.__name__, HookSpecs.__module__, HookSpecs.__module__))
    return headings


def _exported(package: Any) -> list[tuple[str, str]]:
    listed = Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    return re.findall(r"^from \.(\S+) import (\w+) as", listed, re.MULTILINE)


def _defined(package: str, module: str, name: str) -> Name:
    value = getattr(__import__(f"{package}.{module}", fromlist=["_"]), name)
    defined = inspect.isclass(value) or inspect.isfunction(value)
    return Name(name, package, value.__module__ if defined else f"{package}.{module}")


@cache
def _docstrings(file: Path) -> dict[str, str]:
    """Return the docstrings of a module's names; that of a variable comes after its assignment."""
    found, last = {}, ""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ast.get_docstring(node) or ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found[last] = inspect.cleandoc(str(node.value.value))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        last = targets[0].id if isinstance(targets[0], ast.Name) else ""
    return found


# --- tables -----------------------------------------------------------------------------------------------------------


def write_tables() -> str:
    """Return a table of names for each heading, as Markdown; each name links to the file that defines it."""
    names = find_names()
    parts = []
    for package, tables in _TABLES.items():
        parts += [f"## Names of `{package.__name__}`", *(_table(heading, names[heading]) for heading in tables)]
    return "\n\n".join(parts) + "\n"


def _table(heading: str, names: list[Name]) -> str:
    rows = [f"| [`{each.name}`]({each.source}) | {each.summary} |" for each in names]
    return "\n".join([f"### {heading}\n", "| name | what it is |", "| --- | --- |", *rows])


def with_tables(page: str) -> str:
    """Return a page with the tables between its two marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{write_tables()}\n{END}{rest.partition(END)[2]}"


# --- the site ---------------------------------------------------------------------------------------------------------


def link_to_pages(text: str) -> str:
    """Return the text of reference.md with links to the pages of names, which the site alone has."""
    return re.sub(r"^\| \[`(\w+)`\]\([^)]+\)", r"| [`\1`](api/\1.md)", text, flags=re.MULTILINE)


def write_pages(folder: Path) -> None:
    """Write a page for each name, and remove pages of other names; files that stay equal are left alone."""
    folder.mkdir(exist_ok=True)
    pages = {f"{each.name}.md": _page(each) for names in find_names().values() for each in names}
    for file in folder.iterdir():
        if file.name not in pages:
            file.unlink()
    for name, text in pages.items():
        file = folder / name
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")


def _page(name: Name) -> str:
    guides = ", ".join(f"[{title}](../{page})" for page, title in _guides(name.name))
    lines = [
        # In the list of pages that each page has beside it, these would be more than all others.
        f"---\norphan: true\n---\n\n[API reference](../reference.md)\n\n# `{name.name}`\n",
        f"```python\nfrom {name.package} import {name.name}\n```\n",
        f"Pages that use it: {guides}.\n" if guides else "",
        f"```{{eval-rst}}\n.. {name.directive}:: {name.module}.{name.name}",
        *(f"   :{option}:" for option in name.options),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _guides(name: str) -> list[tuple[str, str]]:
    """Return the pages that name it most often, at most five, with their titles."""
    counts = {page: len(re.findall(rf"\b{name}\b", text)) for page, (_, text) in _texts().items()}
    most = sorted((page for page in counts if counts[page]), key=lambda page: -counts[page])[:5]
    return [(page, _texts()[page][0]) for page in most]


@cache
def _texts() -> dict[str, tuple[str, str]]:
    """Return the title and the text of each page."""

    def pages() -> Iterator[tuple[str, tuple[str, str]]]:
        for file in sorted(FOLDER.glob("*.md")):
            text = file.read_text(encoding="utf-8")
            if file != PAGE:
                yield file.name, (text.split("\n")[0].removeprefix("# "), text)

    return dict(pages())


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
