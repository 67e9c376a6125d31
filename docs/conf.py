"""Builds the documentation as a site: the documents, and the contract's reference from its docstrings."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from kvframe import API_VERSION

project = "kvframe"
author = "the kvframe contributors"
version = release = API_VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# The site's root is the repository's, so that links between documents are the same in the repository and here.
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "plugins/*.md",
    "plugins/*/*.md",
    "kernels/*.md",
    "examples/*.md",
    "benchmarks/*.md",
    "benchmarks/*/*.md",
]
exclude_patterns = ["build", ".*"]

html_theme = "furo"
html_title = "kvframe"
myst_heading_anchors = 4

add_module_names = False
autodoc_member_order = "bysource"
autodoc_default_options = {"show-inheritance": True}
napoleon_numpy_docstring = False


_ROOT = Path(__file__).resolve().parents[1]
_SOURCE = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]


def _link_within(app: Any, document: str, content: list[str]) -> None:
    """Let links to the repository's files, which READMEs of packages have, lead to pages of the site."""
    content[0] = content[0].replace(f"]({_SOURCE}/blob/main/", "](/")


def _keep_colons(app: Any, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Begin an attribute's docstring with an empty comment.

    Napoleon takes what is before a colon in the first line for a type.
    """
    if what in ("attribute", "data"):
        lines[:0] = ["..", ""]


def setup(app: Any) -> None:
    """Connect what changes sources, and docstrings before napoleon does."""
    app.connect("source-read", _link_within)
    app.connect("autodoc-process-docstring", _keep_colons, priority=100)
