"""The benchmark of a GPU: its floors, its page, its checks; the script itself runs on a CPU over small cases."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_torch.backend import TorchBackend
from kvframe_triton.backend import TritonBackend
from kvframe_triton.latents import TritonMLABackend
from triton import knobs

from benchmarks.attention import shapes
from benchmarks.gpu import cases, engine, measure, steps, suite
from kvframe import load_plugins
from kvframe.attention.nested import host_tensors
from kvframe.attention.staging import Staging
from kvframe.contract.backend import AttentionBackend
from tests.benchmarks.calling import RESULTS, ROOT, measured, page_of, record_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    return measured(
        folder, "gpu.suite", "--device", "cpu", "--tiny", "--backend", "torch", "--backend", "mla", timeout=600
    )


# --- floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "microseconds"),
    [
        ("decode: 64 x 8k", 500),
        ("prefill: prompt of 8k", 696),
        ("window: window of 1k, prompt of 8k", 163),
        ("MLA decode: 64 x 8k, 128 heads", 185),
        ("Mamba-2 update: 128 requests", 156),
    ],
)
def test_floors_are_bytes_over_bandwidth_or_operations_over_rate(name: str, microseconds: int) -> None:
    (case,) = (case for case in cases.cases() if case.key == name)
    # At 4.3 TB/s and 790 TFLOP/s, an H200's.
    assert microseconds == round(case.floor(cases.ISSUED) * 1e6)


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


def test_a_time_stands_beside_that_of_the_fastest_other(results: Path) -> None:
    record = record_of("gpu", results)
    measured = record["cases"]["tiny: 3 x 40"]["measured"]
    for name, seconds in (("torch", 2e-6), ("SDPA, dense", 1.5e-6)):
        measured[name]["seconds"] = seconds
    page = suite.write_report(record, cases.TINY)
    assert re.search(r"\| 2\.0 \(\d+ %, x 0\.75\) \| \*\*1\.5 \(\d+ %, x 1\.33\)\*\* \|", page)


@pytest.mark.parametrize(("commit", "kept"), [("1234567", True), ("7654321", False), ("unknown", False)])
def test_a_run_of_one_backend_keeps_what_others_did_at_the_same_commit(commit: str, kept: bool, results: Path) -> None:
    before, record = record_of("gpu", results), record_of("gpu", results)
    before["machine"]["commit"] = "unknown" if commit == "unknown" else "1234567"
    record["machine"]["commit"] = commit
    (name, case), *_ = record["cases"].items()
    record["cases"] = {name: {**case, "measured": {"other": case["measured"]["torch"]}}}
    found = suite.merged(before, record)
    assert (["torch", "SDPA, dense", "other"] if kept else ["other"]) == [*found["cases"][name]["measured"]]
    assert (before["cases"].keys() if kept else {name}) == found["cases"].keys()
    assert record == suite.merged({}, record)


# --- steps of an engine -----------------------------------------------------------------------------------------------


def test_steps_are_measured_without_graphs_and_with_one() -> None:
    found = engine.measure_steps(engine.TINY_WORKLOAD, torch.device("cpu"), "cpu")
    assert {"off": "", "decode": ""} == {name: each["reason"] for name, each in found.items()}
    assert all(each["seconds"] > 0 and each["busy_seconds"] > 0 for each in found.values())
    record = {"name": "some", "graphs": found}
    assert 2 == suite._steps(record).count("| `kvframe-cpu:cpu` |")


class Wrong(TorchBackend):
    def forward(self, *args: Any) -> torch.Tensor:
        return 1.1 * super().forward(*args)


class Raising(TorchBackend):
    def forward(self, *args: Any) -> torch.Tensor:
        raise RuntimeError("no kernel")


@pytest.mark.parametrize(("backend", "reason"), [(Wrong, "wrong"), (Raising, "RuntimeError: no kernel")])
def test_what_computes_something_else_or_fails_is_not_timed(backend: type[TorchBackend], reason: str) -> None:
    case = cases.TINY[0]
    found = measure.measure(case, backend, load_plugins().registry, torch.device("cpu"))
    assert (None, reason) == (found.seconds, found.reason)


def test_a_backend_that_took_its_share_of_the_time_leaves_the_rest_to_the_others() -> None:
    case, spent = cases.TINY[2], {"slow": 61.0, "torch": 0.0}
    backends = {"slow": TorchBackend, "torch": TorchBackend}
    found = measure.measure_case(case, backends, load_plugins().registry, torch.device("cpu"), spent)
    assert (None, "out of time") == (found["slow"].seconds, found["slow"].reason)
    assert found["torch"].seconds > 0
    assert spent["torch"] > 0


def test_what_a_backend_would_read_from_copies_is_left_out() -> None:
    stored = dataclasses.replace(cases.TINY[0], format="fp8_tensor")
    assert "format" == measure.why_refused(stored, TorchBackend, load_plugins().registry, "cpu")


# --- what only a GPU times, on a CPU ----------------------------------------------------------------------------------


class Triton(TritonBackend):
    capabilities = attrs.evolve(TritonBackend.capabilities, devices=frozenset({"cpu"}))


class TritonMLA(TritonMLABackend):
    capabilities = attrs.evolve(TritonMLABackend.capabilities, devices=frozenset({"cpu"}))


interpreted = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="a CUDA device is there, on which the script itself is run"
)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    no_time = measure.Measured(seconds=1.0, how="clock")
    monkeypatch.setattr(measure, "time_calls", lambda calls, device, error: no_time)
    monkeypatch.setattr(steps, "MAX_ROTATION", 3)  # sets of pages, which an interpreter fills


@interpreted
@pytest.mark.whole
@pytest.mark.usefixtures("_untimed")
def test_tritons_kernels_compute_every_kind_of_case() -> None:
    *tiny, latents = cases.TINY
    stored = [dataclasses.replace(tiny[0], format=name) for name in ("fp8_tensor", "int8_token_head")]
    served = [*((Triton, case) for case in (*tiny, *stored)), (TritonMLA, latents)]
    for backend, case in served:
        found = measure.measure(case, backend, load_plugins().registry, torch.device("cpu"))
        assert ("", 1.0) == (found.reason, found.seconds)


@interpreted
@pytest.mark.usefixtures("_untimed")
def test_the_kernel_of_states_is_measured_beside_plain_torch() -> None:
    case = cases.StateCase(
        name="tiny", kind="tiny", requests=shapes.decodes(2, 1), num_heads=2, head_size=16, state_size=16
    )
    found = measure.measure_states(case, torch.device("cpu"))
    assert {"kernel": "", "plain torch": ""} == {name: each.reason for name, each in found.items()}


@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend, TritonMLABackend])
def test_metadata_that_is_built_on_the_host_is_brought_to_the_device(backend: type[AttentionBackend]) -> None:
    there = torch.device("meta")
    case = cases.TINY[-1 if "latent" in backend.capabilities.state else 0]
    layer = steps.make_layer(case, 16, load_plugins().registry)
    builder = backend([layer], there).make_builder()
    assert builder.on_host is not None
    built = steps.build_on_device(
        builder, steps.make_metadata([steps.Request(*request) for request in case.requests], 16), Staging(there)
    )
    assert not host_tensors(built)


# --- the committed page -----------------------------------------------------------------------------------------------


def test_the_committed_page_has_a_row_for_every_case() -> None:
    path = RESULTS / "gpu.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    page = page_of("gpu")
    assert suite.write_report(record, tuple(cases.cases())) == page
    assert all(f"| {case.name} |" in page for case in cases.cases())


# --- the shell script -------------------------------------------------------------------------------------------------


def test_packages_are_found_without_being_installed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.environment", str(tmp_path)]
    sources = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert str(ROOT / "plugins/mla/src") in sources.split(":")
    code = (
        "import importlib.metadata as m, sys; "
        "found = {d.name for d in m.distributions(path=[sys.argv[1]])}; "
        "points = {p.value for d in m.distributions(path=[sys.argv[1]]) for p in d.entry_points}; "
        "print('kvframe-mla' in found, 'kvframe' in found, 'kvframe_mla.plugin' in points)"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "True True True" == shown.stdout.strip()


def test_the_script_says_how_it_is_called() -> None:
    done = subprocess.run([str(ROOT / "benchmarks" / "gpu.sh"), "--help"], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert "benchmarks/gpu.sh [--wheels FOLDER] [--out FOLDER]" in done.stdout
    assert 0 == subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "gpu.sh")], check=False).returncode


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
