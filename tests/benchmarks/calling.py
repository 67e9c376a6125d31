"""Calls a benchmark as a person does, and reads its records."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.programs import python_in_forks, run_program

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def call(module: str, *options: str, timeout: int = 280, forks: bool = True) -> subprocess.CompletedProcess[str]:
    """Run ``python -m benchmarks.…`` from the root; ``forks`` are its processes unless they get open files from it."""
    executable = python_in_forks() if forks else None
    return run_program("-m", f"benchmarks.{module}", *options, timeout=timeout, executable=executable)


def measured(folder: Path, module: str, *options: str, timeout: int = 280, forks: bool = True) -> Path:
    """Return a folder into which a benchmark wrote its record and its page."""
    done = call(module, *options, "--results", str(folder), timeout=timeout, forks=forks)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def record_of(name: str, folder: Path = RESULTS) -> Any:
    """Return a record, parsed from JSON; the committed one unless a folder is given."""
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def page_of(name: str, folder: Path = RESULTS) -> str:
    """Return a page; the committed one unless a folder is given."""
    return (folder / f"{name}.md").read_text(encoding="utf-8")
