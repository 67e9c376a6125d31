"""Builds the documentation as a site: the documents, and a page of each public name from its docstring."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from kvframe import API_VERSION

sys.path.insert(0, str(Path(__file__).parent))

import reference
import site_pages

project = "kvframe"
author = "the kvframe contributors"
version = release = API_VERSION
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# The site's root is the repository's, so that links between documents are the same in the repository and here.
root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/api/*.md",
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
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
myst_heading_anchors = 4

add_module_names = False
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 120
napoleon_numpy_docstring = False


_ROOT = Path(__file__).resolve().parents[1]
_SOURCE = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Source"]


def _change_source(app: Any, document: str, content: list[str]) -> None:
    """Let links that the repository needs lead to pages of the site, and add what the site alone has."""
    # READMEs of packages have whole addresses, because the package index shows them too.
    content[0] = content[0].replace(f"]({_SOURCE}/blob/main/", "](/")
    if document == root_doc:
        pages = _ROOT / "docs" / "README.md"
        app.env.note_dependency(pages)
        content[0] += site_pages.toctrees(pages.read_text(encoding="utf-8"))
    if document == "docs/reference":
        content[0] = reference.link_to_pages(content[0])


def _keep_colons(app: Any, what: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Begin an attribute's docstring with an empty comment.

    Napoleon takes what is before a colon in the first line for a type.
    """
    if what in ("attribute", "data"):
        lines[:0] = ["..", ""]


def _shorten_defaults(
    app: Any, what: str, name: str, documented: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Write defaults as Python: Sphinx cannot read a signature with ``<built-in function monotonic>``.

    For ``NOTHING``, an attrs class makes the value itself.
    """
    if signature is not None:
        signature = re.sub(r"<(?:built-in )?(?:function|class) '?([\w.]+)[^>]*>", r"\1", signature)
        signature = signature.replace("= NOTHING", "= ...")
    return signature, returns


def setup(app: Any) -> None:
    """Connect what changes sources and pages, and docstrings before napoleon does."""
    reference.write_pages(Path(__file__).with_name("api"))
    app.add_builder(site_pages.SiteBuilder, override=True)
    app.connect("source-read", _change_source)
    app.connect("doctree-resolved", site_pages.inline_drawings)
    app.connect("autodoc-process-signature", _shorten_defaults)
    app.connect("autodoc-process-docstring", _keep_colons, priority=100)
