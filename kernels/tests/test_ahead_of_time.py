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

SOME = "some"
"""Instead of a pattern of names: few launches in which every part of a name occurs, between its dashes."""

SCRIPT = """
import json, re, runpy, sys
from kvframe_kernels.triton.ahead_of_time import compile_launch
launches, some = runpy.run_path(sys.argv[1])["launches"](), []
parts = {name: {*name.split("-")} for name in launches}
while missing := set().union(*parts.values()).difference(*(parts[name] for name in some)):
    some.append(max(parts, key=lambda name: len(parts[name] & missing)))
for name, launch in launches.items():
    if not (name in some if sys.argv[2] == "some" else re.search(sys.argv[2], name)):
        continue
    found = compile_launch(launch)
    figures = {key: getattr(found, key) for key in ("registers", "shared_bytes", "stack_bytes", "num_warps")}
    counts = {instruction: found.count(instruction) for instruction in sys.argv[3:]}
    print(json.dumps({"name": name, **figures, **counts}))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's folder for what it compiled, so that no launch is compiled twice."""
    return tmp_path_factory.mktemp("triton")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_some_launches_compile_within_the_limits_of_a_multiprocessor(path: Path, cache: Path) -> None:
    assert_within_limits(compile_all(path, cache, SOME))


@pytest.mark.whole
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_launch_compiles_within_the_limits_of_a_multiprocessor(path: Path, cache: Path) -> None:
    assert_within_limits(compile_all(path, cache))


def assert_within_limits(compiled: list[dict[str, Any]]) -> None:
    assert 0 < len(compiled)
    for found in compiled:
        assert MAX_SHARED_BYTES >= found["shared_bytes"], found
        assert MAX_REGISTERS >= 32 * found["num_warps"] * found["registers"], found
        assert MAX_STACK_BYTES >= found["stack_bytes"], found


@pytest.mark.parametrize("rows", [(16, 64), pytest.param((16, 32, 64, 128), marks=pytest.mark.whole)])
def test_prompts_are_the_tensor_cores_work_and_decodes_load_16_bytes_at_a_time(
    rows: tuple[int, ...], cache: Path
) -> None:
    loads, wide = "LDGSTS", "LDGSTS.E.BYPASS.128"
    path, names = HERE / "launches" / "attention.py", f"^plain-rows=({'|'.join(map(str, rows))})$"
    compiled = {found["name"]: found for found in compile_all(path, cache, names, "HGMMA", "HMMA", loads, wide)}
    assert {f"plain-rows={count}" for count in rows} == set(compiled)
    for found in compiled.values():
        assert found[wide] == found[loads] > 0, found
    assert 0 < compiled["plain-rows=16"]["HMMA"]
    assert [] == [count for count in rows if count >= 64 and not compiled[f"plain-rows={count}"]["HGMMA"]]


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
