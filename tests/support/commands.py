"""What commands print beside their own output."""

from __future__ import annotations

import re


def without_start(stderr: str) -> str:
    """Return what a command printed to stderr, apart from the lines that say what serves a model."""
    start = r"kvframe: .* runs on .*; attention by .*; a cache of .* MiB\n"
    no_cache = r"kvframe: .*: no layer keeps anything of the past: .*\n"
    return re.sub(f"^({start}|{no_cache})", "", stderr, flags=re.MULTILINE)
