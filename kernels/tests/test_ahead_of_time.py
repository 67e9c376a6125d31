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
"""Instead of a pattern of names: few launches in which each part of a name between dashes occurs, of any size."""

SCRIPT = """
import json, re, runpy, sys
from kvframe_kernels.triton.ahead_of_time import compile_launch
def chosen(launches, names):
    if names != "some":
        return [name for name in launches if re.search(names, name)]
    found, parts = [], {name: {*re.sub(r"[0-9.]+", "", name).split("-")} for name in launches}
    while missing := set().union(*parts.values()).difference(*(parts[name] for name in found)):
        found.append(max(parts, key=lambda name: len(parts[name] & missing)))
    return found
for path, names, *counted in json.loads(sys.argv[1]):
    launches, compiled = runpy.run_path(path)["launches"](), {}
    for name in chosen(launches, names):
        found = compile_launch(launches[name])
        figures = {key: getattr(found, key) for key in ("registers", "shared_bytes", "stack_bytes", "num_warps")}
        compiled[name] = {**figures, **{instruction: found.count(instruction) for instruction in counted}}
    print(json.dumps(compiled))
"""

Compiled = dict[str, dict[str, Any]]
"""The resources of launches by name, and the numbers of the counted instructions."""

LOADS, WIDE_LOADS = "LDGSTS", "LDGSTS.E.BYPASS.128"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Triton's folder for what it compiled, so that no launch is compiled twice."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def some(cache: Path) -> dict[str, Compiled]:
    """What usual runs compile, in one process: some launches of each file, and those whose instructions are counted."""
    compiled = compile_all(cache, *([path, SOME] for path in FILES), prompts_and_decodes("rows=16", "prompt-rows=64"))
    return dict(zip([*(path.stem for path in FILES), "counted"], compiled, strict=True))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_some_launches_compile_within_the_limits_of_a_multiprocessor(path: Path, some: dict[str, Compiled]) -> None:
    assert_within_limits(some[path.stem])


@pytest.mark.whole
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_launch_compiles_within_the_limits_of_a_multiprocessor(path: Path, cache: Path) -> None:
    (compiled,) = compile_all(cache, [path, ""])
    assert_within_limits(compiled)


def assert_within_limits(compiled: Compiled) -> None:
    assert 0 < len(compiled)
    for name, counts in compiled.items():
        assert MAX_SHARED_BYTES >= counts["shared_bytes"], name
        assert MAX_REGISTERS >= 32 * counts["num_warps"] * counts["registers"], name
        assert MAX_STACK_BYTES >= counts["stack_bytes"], name


def test_prompts_are_the_tensor_cores_work_and_decodes_load_16_bytes_at_a_time(some: dict[str, Compiled]) -> None:
    assert_instructions(some["counted"], "rows=16", "prompt-rows=64")


@pytest.mark.whole
def test_every_shape_is_the_tensor_cores_work_or_loads_16_bytes_at_a_time(cache: Path) -> None:
    shapes = "rows=16", "rows=32", "rows=64", "prompt-rows=64", "prompt-rows=256"
    (compiled,) = compile_all(cache, prompts_and_decodes(*shapes))
    assert_instructions(compiled, *shapes)


def prompts_and_decodes(*shapes: str) -> list[Any]:
    """Return what to compile, with so many rows of queries, and to count."""
    names = f"^plain-({'|'.join(shapes)})$"
    return [HERE / "launches" / "attention.py", names, "HGMMA", "HMMA", LOADS, WIDE_LOADS]


def assert_instructions(compiled: Compiled, *shapes: str) -> None:
    assert {f"plain-{shape}" for shape in shapes} == set(compiled)
    for name, counts in compiled.items():
        assert counts[WIDE_LOADS] == counts[LOADS] > 0, name
    assert 0 < compiled["plain-rows=16"]["HMMA"]
    few_rows = "plain-rows=16", "plain-rows=32"
    assert [] == [name for name, counts in compiled.items() if name not in few_rows and not counts["HGMMA"]]


def compile_all(cache: Path, *requests: list[Any]) -> list[Compiled]:
    """Compile in one process; each of ``requests`` is a file, the pattern of its launches' names, and what to count."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(requests, default=str)],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == process.returncode, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]
