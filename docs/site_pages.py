"""What Sphinx lacks for the site: a landing page at its root, drawings in colours of the page, lists of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.builders.html import StandaloneHTMLBuilder

ROOT = Path(__file__).resolve().parents[1]
_AT_ROOT = "index"


class SiteBuilder(StandaloneHTMLBuilder):
    """Writes the root document as the index of the site, wherever its source is."""

    def __init__(self, app: Any, env: Any) -> None:
        """Begin without pages."""
        super().__init__(app, env)
        self._lists_of_folders: dict[tuple[Path, str], str] = {}

    def get_target_uri(self, docname: str, typ: str | None = None) -> str:
        """Return the address of a page."""
        return super().get_target_uri(self._at_root(docname), typ)

    def get_output_path(self, page_name: str, /) -> Path:
        """Return the file of a page."""
        return super().get_output_path(self._at_root(page_name))

    def _get_local_toctree(self, docname: str, collapse: bool = True, **options: Any) -> str:
        # Pages of names and of their source are in no list of pages. So the list beside those of one folder is the
        # same, and making it is most of the work of writing such a page.
        if not docname.startswith(("docs/api/", "_modules/")):
            return super()._get_local_toctree(docname, collapse, **options)
        key = (Path(docname).parent, str((collapse, options)))
        if key not in self._lists_of_folders:
            self._lists_of_folders[key] = super()._get_local_toctree(docname, collapse, **options)
        return self._lists_of_folders[key]

    def _at_root(self, page: str) -> str:
        return _AT_ROOT if page == self.config.root_doc else page


def inline_drawings(app: Any, doctree: nodes.document, docname: str) -> None:
    """Put drawings into the page itself, because a picture in a file cannot follow the colours that a reader chose."""
    if app.builder.format != "html":
        return
    for image in list(doctree.findall(nodes.image)):
        file = ROOT / image["uri"]
        if file.suffix == ".svg" and 'class="drawing"' in (drawing := file.read_text(encoding="utf-8")):
            named = drawing.replace("<svg ", f'<svg aria-label="{nodes.Text(image["alt"])}" ', 1)
            image.replace_self(nodes.raw("", f'<div class="wide">{named}</div>', format="html"))


def toctrees(pages: str) -> str:
    """Return a hidden table of contents for each section of the list of pages, as MyST."""
    return "\n".join(_sections(pages))


def _sections(pages: str) -> Iterator[str]:
    yield _toctree("", "README")
    for section in pages.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        linked = [line.partition("): ")[0] for line in text.splitlines() if line[:1].isdigit()]
        links = re.findall(r"\[([^]]+)\]\(([\w./-]+)\.md", "\n".join(linked))
        entries = [f"{text.replace('`', '')} <{page}>" for text, page in links]
        yield _toctree(heading.partition(" (")[0], *entries)
    yield _toctree("The plugins of this repository", "../plugins/*/README", "../kernels/README")
    yield _toctree("Measurements", "../benchmarks/README", "../benchmarks/gpu/notes", "../benchmarks/results/*")


def _toctree(caption: str, *entries: str) -> str:
    options = [f":caption: {caption}"] if caption else []
    return "\n".join(["", "```{toctree}", *options, ":maxdepth: 1", ":hidden:", ":glob:", "", *entries, "```", ""])
