"""Every kernel compiles for a Hopper GPU, within the resources of one program.

A file in ``launches/`` has a function ``launches()``, which returns kernel calls by name, on ``meta`` tensors. They are
compiled in a separate process without the interpreter, under which nothing can be compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FILES = sorted((HERE / "launches").glob("*.py"))
MAX_SHARED_BYTES = 227 * 1024
MAX_REGISTERS = 64 * 1024
MAX_STACK_BYTES = 16
"""With more local memory, registers would be spilled within a loop."""

SCRIPT = """
import json, re, runpy, sys
from kvframe_kernels.triton.ahead_of_time import compile_launch
for name, launch in runpy.run_path(sys.argv[1])["launches"]().items():
    if not re.search(sys.argv[2], name):
        continue
    found = compile_launch(launch)
    figures = {key: getattr(found, key) for key in ("registers", "shared_bytes", "stack_bytes", "num_warps")}
    counts = {instruction: found.count(instruction) for instruction in sys.argv[3:]}
    print(json.dumps({"name": name, **figures, **counts}))
"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_launch_compiles_within_the_limits_of_a_multiprocessor(path: Path, tmp_path: Path) -> None:
    compiled = compile_all(path, tmp_path)
    assert 0 < len(compiled)
    for found in compiled:
        assert MAX_SHARED_BYTES >= found["shared_bytes"], found
        assert MAX_REGISTERS >= 32 * found["num_warps"] * found["registers"], found
        assert MAX_STACK_BYTES >= found["stack_bytes"], found


def test_prompts_are_the_tensor_cores_work_and_decodes_load_16_bytes_at_a_time(tmp_path: Path) -> None:
    loads, wide = "LDGSTS", "LDGSTS.E.BYPASS.128"
    path = HERE / "launches" / "attention.py"
    compiled = {
        found["name"]: found for found in compile_all(path, tmp_path, "^plain-rows", "HGMMA", "HMMA", loads, wide)
    }
    assert {"plain-rows=16", "plain-rows=32", "plain-rows=64", "plain-rows=128"} == set(compiled)
    for found in compiled.values():
        assert found[wide] == found[loads] > 0, found
    assert 0 < compiled["plain-rows=16"]["HMMA"]
    assert (0, 0) < (compiled["plain-rows=64"]["HGMMA"], compiled["plain-rows=128"]["HGMMA"])


def compile_all(path: Path, cache: Path, names: str = "", *counted: str) -> list[dict[str, Any]]:
    """Return the resources of a file's launches, and the numbers of the counted instructions."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, path, names, *counted],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
