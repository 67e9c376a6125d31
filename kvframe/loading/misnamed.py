"""Finds plugins that kvframe does not see, because the group of their entry points is misspelt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import SequenceMatcher

from kvframe.contract.errors import shorten
from kvframe.contract.foreign import in_one_line
from kvframe.loading.claims import canonical
from kvframe.loading.discovery import GROUP, distribution_names

_SECTION = re.compile(r"^\s*\[\s*(.*?)\s*\]\s*$", re.MULTILINE)
_NEAR = 0.8
_READ = re.compile(r"kvframe\.(v\d+(\.api)?|commands|answers)")
"""The groups that kvframe and its hosts read."""


def find_misnamed() -> list[str]:
    """Return a sentence for each installed distribution with entry points in a group like kvframe's."""
    return [
        f"{name} lists entry points in the group {shorten(group)!r}, which kvframe does not read: a plugin is listed "
        f"in {GROUP!r}, and its version of the contract in {GROUP + '.api'!r}"
        for name, group in _misnamed()
    ]


def hint_for(plugin_name: str) -> str:
    """Return which distributions may be meant by a name, or ``distribution:name``, that is not found; empty if none."""
    owner, _, name = plugin_name.rpartition(":")
    sentences = find_misnamed()
    candidates = {canonical(owner)} if owner else {canonical(name), f"kvframe-{canonical(name)}"}
    misnamed_distributions = {distribution for distribution, _ in _misnamed()}
    for distribution, text in distribution_names():
        if distribution in candidates and distribution not in misnamed_distributions and GROUP not in text:
            sentences.append(f"{distribution} is installed, and has no entry point in the group {GROUP!r}")
    return "; ".join(sentences)


def _misnamed() -> Iterator[tuple[str, str]]:
    """Yield distributions, each with a group that is like kvframe's and that kvframe does not read."""
    for distribution, text in distribution_names():
        groups = [in_one_line(group) for group in _SECTION.findall(text)]
        has_plugin = GROUP in groups
        for group in groups:
            if not _READ.fullmatch(group) and (_is_near(group) or (group.startswith("kvframe") and not has_plugin)):
                yield distribution, group


def _is_near(group: str) -> bool:
    return any(
        SequenceMatcher(None, group[:100].lower(), known_group).ratio() >= _NEAR
        for known_group in (GROUP, f"{GROUP}.api")
    )
