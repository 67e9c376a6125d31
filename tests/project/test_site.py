"""The built site can be read on wide and narrow screens, light and dark: `make docs`, then `make site`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.browser import Browser, find_program, start

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
PAGES = (
    "index.html",
    "README.html",
    "SECURITY.html",
    "docs/api/CommonAttentionMetadata.html",
    "docs/api/Engine.html",
    "docs/api/KVCacheManager.html",
    "docs/command_line.html",
    "docs/comparison.html",
    "docs/design.html",
    "docs/glossary.html",
    "docs/install.html",
    "docs/metrics.html",
    "docs/reference.html",
    "docs/stack_file.html",
    "docs/troubleshooting.html",
    "plugins/MODELS.html",
)
"""Pages with long tables, long code, signatures and drawings."""

pytestmark = pytest.mark.site


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_program()
    assert program is not None, "install chromium"
    assert SITE.exists(), "run make docs"
    with start(program) as started:
        yield started


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("page", PAGES)
def test_no_page_scrolls_sideways(browser: Browser, page: str, width: int) -> None:
    browser.open(SITE / page, width=width, dark=False)
    assert browser.evaluate("document.querySelector('article h1') !== null")
    assert width >= browser.evaluate("document.documentElement.scrollWidth")


INK = "getComputedStyle(document.querySelector('.drawing text')).fill"
PAPER = "getComputedStyle(document.querySelector('.drawing rect')).fill"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_drawings_have_the_colours_of_their_page(browser: Browser, scheme: str) -> None:
    browser.open(SITE / "docs/design.html", width=1280, dark=scheme == "dark")
    colours = {}
    for theme in ("auto", "light", "dark"):
        browser.evaluate(f"document.body.dataset.theme = '{theme}'")
        colours[theme] = (browser.evaluate(INK), browser.evaluate(PAPER))
    assert colours["light"] != colours["dark"]
    assert colours["auto"] == colours[scheme]


def test_the_landing_page_leads_to_the_others(browser: Browser) -> None:
    browser.open(SITE / "index.html", width=1280, dark=False)
    assert 3 == browser.evaluate("document.querySelectorAll('#three-doors > ul > li strong a').length")
    links = browser.evaluate("[...document.querySelectorAll('article a[href]')].map(a => a.href.split('#')[0])")
    assert {} == {link: "missing" for link in links if link.startswith("file:") and not Path(link[7:]).exists()}
    assert f"file://{SITE}/docs/tutorial_operator.html" in links
