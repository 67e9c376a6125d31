"""Builds the documentation as a site: the documents, and the contract's reference from its docstrings."""

from __future__ import annotations

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


def _keep_colons(app: Any, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Begin an attribute's docstring with an empty comment.

    Napoleon takes what is before a colon in the first line for a type.
    """
    if what in ("attribute", "data"):
        lines[:0] = ["..", ""]


def setup(app: Any) -> None:
    """Connect it before napoleon."""
    app.connect("autodoc-process-docstring", _keep_colons, priority=100)
