"""Describe the run in a record: the machine, the versions, the command and the commit."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PEER = ROOT / ".cache" / "peers" / "vllm"
"""The folder in which ``make peer`` installs vLLM."""


def describe_machine(threads: int, *others: str) -> dict[str, Any]:
    """Return the machine, the commit, the command, and the versions of the packages that figures depend on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "kvframe", "numpy", *others)},
        "commit": commit.stdout.strip() or "unknown",
        "command": command_line(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def command_line() -> str:
    """Return the command line of this process for a shell, without ``--results``, which changes no figure."""
    arguments = [*sys.argv[1:]]
    if "--results" in arguments:
        place = arguments.index("--results")
        del arguments[place : place + 2]
    script = Path(sys.argv[0]).resolve()
    called = ".".join(script.relative_to(ROOT).with_suffix("").parts) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", "-m", called, *arguments])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
