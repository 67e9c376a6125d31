"""The benchmark of a GPU: its floors, its page, its checks; the script itself runs on a CPU over small cases."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from triton import knobs

from benchmarks.attention import shapes
from benchmarks.gpu import cases, engine, measure, steps, suite
from tests.benchmarks.calling import RESULTS, ROOT, measured, page_of, record_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    return measured(
        folder, "gpu.suite", "--device", "cpu", "--tiny", "--backend", "torch", "--backend", "mla", timeout=600
    )


# --- a run ------------------------------------------------------------------------------------------------------------


def test_every_case_is_measured_and_right(results: Path) -> None:
    found = record_of("gpu", results)["cases"]
    expected = {
        "tiny: 3 x 40": {"torch", "SDPA, dense"},
        "tiny: prompt of 70": {"torch", "SDPA, dense"},
        "tiny: window": {"torch"},
        "tiny: chunks": {"torch"},
        "tiny: last token": {"torch"},
        "tiny: latents": {"mla"},
    }
    assert expected == {name: {*case["measured"]} for name, case in found.items()}
    measured = [(name, each) for case in found.values() for name, each in case["measured"].items()]
    assert all(each["seconds"] > 0 and not each["reason"] for _, each in measured)
    assert all(each["error"] < 0.02 for name, each in measured if name != "SDPA, dense")


# --- steps of an engine -----------------------------------------------------------------------------------------------


def test_steps_are_measured_without_graphs_and_with_one() -> None:
    found = engine.measure_steps(engine.TINY_WORKLOAD, torch.device("cpu"), "cpu")
    assert dict.fromkeys(engine.GRAPHS, "") == {name: each["reason"] for name, each in found.items()}
    assert all(each["seconds"] > 0 and each["busy_seconds"] > 0 for each in found.values())
    record = {"name": "some", "graphs": found}
    assert len(engine.GRAPHS) == suite._steps(record).count("| `kvframe-cpu:cpu` |")


# --- what only a GPU times, on a CPU ----------------------------------------------------------------------------------


interpreted = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="a CUDA device is there, on which the script itself is run"
)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    no_time = measure.Measured(seconds=1.0, how="clock")
    monkeypatch.setattr(measure, "time_calls", lambda calls, device, error: no_time)
    monkeypatch.setattr(steps, "MAX_ROTATION", 3)  # sets of pages, which an interpreter fills


@interpreted
@pytest.mark.usefixtures("_untimed")
def test_the_kernel_of_states_is_measured_beside_plain_torch() -> None:
    case = cases.StateCase(
        name="tiny", kind="tiny", requests=shapes.decodes(2, 1), num_heads=2, head_size=16, state_size=16
    )
    found = measure.measure_states(case, torch.device("cpu"))
    assert {"kernel": "", "plain torch": ""} == {name: each.reason for name, each in found.items()}


# --- the committed page -----------------------------------------------------------------------------------------------


def test_the_committed_page_has_a_row_for_every_case() -> None:
    path = RESULTS / "gpu.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    page = page_of("gpu")
    assert suite.write_report(record, tuple(cases.cases())) == page
    assert all(f"| {case.name} |" in page for case in cases.cases())


# --- the shell script -------------------------------------------------------------------------------------------------


def test_what_the_script_calls_is_there() -> None:
    text = (ROOT / "benchmarks" / "gpu.sh").read_text(encoding="utf-8")
    called = re.findall(r"-m benchmarks\.gpu\.(\w+)((?: --\w+| \"\$\w+\"| \d+)*)", text)
    assert {"suite", "environment"} == {name for name, _ in called}
    known = {option for parameter in suite.main.params for option in parameter.opts}
    assert (
        known >= {option for name, given in called if name == "suite" for option in re.findall(r"--\w+", given)} > set()
    )
    assert {"plugins"} == set(re.findall(r"-m kvframe (\w+)", text))
    assert "plugins" in importlib.import_module("kvframe.cli").main.list_commands(None)
    assert "gpu" in {each.split(":")[0] for each in markers()}


WITHOUT = """
import sys

for name in ("hypothesis", "transformers", "tokenizers", "safetensors"):
    sys.modules[name] = None  # as Python says of what is not there
"""
"""A module that, imported first, hides what tests of other things need."""


def test_tests_of_a_gpu_need_nothing_that_other_tests_need(tmp_path: Path) -> None:
    (find,) = re.findall(
        r"< <\((grep .+)\)$", (ROOT / "benchmarks" / "gpu.sh").read_text(encoding="utf-8"), re.MULTILINE
    )
    found = subprocess.run(["bash", "-c", find], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {"kernels/tests/test_attention.py", "tests/attention/test_steps_on_a_gpu.py"} < {*found}
    (tmp_path / "without.py").write_text(WITHOUT, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "without", "-m", "gpu", "--collect-only", "-q", "-rs"]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, *found, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert "tiny models are made by transformers" in done.stdout
    with_tests = {line.split("::")[0] for line in done.stdout.splitlines() if "::" in line}
    with_models = {"tests/attention/test_steps_on_a_gpu.py", "tests/models/test_models_on_a_gpu.py"}
    assert {*found} - with_models == with_tests


def markers() -> list[str]:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    found: list[str] = options["markers"]
    return found
