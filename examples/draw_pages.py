"""Look at a model's cache before and while it runs: three pages with pictures, which need no network.

``python examples/draw_pages.py path/to/model folder`` writes them into a folder.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PREFIX = "def fill(items, count):\n    return [items[0]] * count\n\n"
PROMPTS = [f"{PREFIX}def {name}(" for name in ("first", "last", "longest")]


def main(model: str, folder: str) -> None:
    """Write the pages of a model's plan, of the choice of its backends, and of a run."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, what, arguments in (
        ("plan.html", "what each layer keeps as a request grows, and where the bytes go", ["plan", model]),
        ("explain.html", "which backend each layer gets, and why not the others", ["explain", model]),
        ("trace.html", "when each request waited, ran and was preempted, and what it held", trace_of(model)),
    ):
        page = Path(folder) / name
        command = [sys.executable, "-m", "kvframe", *arguments, "--html", str(page)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        print(f"{page}: {what}")


def trace_of(model: str) -> list[str]:
    """Return the command that runs prompts with a common prefix, all at once, in a small cache."""
    return ["trace", model, "--memory", "1MiB", "--max-new-tokens", "32", *(f"--prompt={prompt}" for prompt in PROMPTS)]


if __name__ == "__main__":
    main(*(sys.argv[1:] if len(sys.argv) == 3 else [".cache/demo-model", "build/pages"]))
