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
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from kvframe_triton.backend import TritonBackend
from kvframe_triton.latents import TritonMLABackend
from triton import knobs

from kvframe import load_plugins
from kvframe.attention.nested import host_tensors
from kvframe.attention.staging import Staging
from kvframe.builtin.torch_backend import TorchBackend
from kvframe.contract.backend import AttentionBackend

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("gpu")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def measuring(script: ModuleType) -> ModuleType:
    return sys.modules["gpu_measure"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--tiny", "--results", str(folder)]
    command += ["--backend", "torch", "--backend", "mla"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder


def record_of(path: Path) -> Any:
    return json.loads((path / "gpu.json").read_text(encoding="utf-8"))


# --- floors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "microseconds"),
    [
        ("decode: 16 x 2k", 31),
        ("decode: 64 x 8k", 500),
        ("decode: 1 x 32k", 31),
        ("prefill: prompt of 8k", 696),
        ("window: window of 1k, prompt of 8k", 163),
        ("chunked local: chunks of 1k, prompt of 8k", 87),
        ("decode-only: prompt of 8k, its last token alone", 8),
        ("MLA decode: 64 x 8k, 128 heads", 185),
        ("Mamba-2 update: 128 requests", 156),
    ],
)
def test_floors_are_bytes_over_bandwidth_or_operations_over_rate(
    name: str, microseconds: int, script: ModuleType
) -> None:
    (case,) = (case for case in script.cases() if f"{case.group}: {case.name}" == name)
    # At 4.3 TB/s and 790 TFLOP/s, an H200's.
    ceilings = sys.modules["gpu_cases"].ISSUED
    assert microseconds == round(case.floor(ceilings) * 1e6)


def test_names_of_cases_are_their_own(script: ModuleType) -> None:
    names = [f"{case.group}: {case.name}" for case in script.cases()]
    assert len(set(names)) == len(names)


def test_calls_take_turns_over_more_than_a_cache_holds(script: ModuleType) -> None:
    steps = sys.modules["gpu_steps"]
    for case in script.cases():
        read = steps.rotation(case) * case.kv_bytes()
        assert read >= 256 << 20


# --- a run ------------------------------------------------------------------------------------------------------------


def test_every_case_is_measured_and_right(results: Path) -> None:
    found = record_of(results)["cases"]
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


def test_the_page_shows_every_time(results: Path) -> None:
    page = (results / "gpu.md").read_text(encoding="utf-8")
    for case in record_of(results)["cases"].values():
        for each in case["measured"].values():
            assert f"{each['seconds'] * 1e6:,.1f} (" in page


def test_a_time_stands_beside_that_of_the_fastest_other(results: Path, script: ModuleType) -> None:
    record = record_of(results)
    measured = record["cases"]["tiny: 3 x 40"]["measured"]
    for name, seconds in (("torch", 2e-6), ("SDPA, dense", 1.5e-6)):
        measured[name]["seconds"] = seconds
    page = script.write_report(record, sys.modules["gpu_cases"].TINY)
    assert re.search(r"\| 2\.0 \(\d+ %, x 0\.75\) \| \*\*1\.5 \(\d+ %, x 1\.33\)\*\* \|", page)


@pytest.mark.parametrize(("commit", "kept"), [("1234567", True), ("7654321", False), ("unknown", False)])
def test_a_run_of_one_backend_keeps_what_others_did_at_the_same_commit(
    commit: str, kept: bool, results: Path, script: ModuleType
) -> None:
    before, record = record_of(results), record_of(results)
    before["machine"]["commit"] = "unknown" if commit == "unknown" else "1234567"
    record["machine"]["commit"] = commit
    (name, case), *_ = record["cases"].items()
    record["cases"] = {name: {**case, "measured": {"other": case["measured"]["torch"]}}}
    found = script.merged(before, record)
    assert (["torch", "SDPA, dense", "other"] if kept else ["other"]) == [*found["cases"][name]["measured"]]
    assert (before["cases"].keys() if kept else {name}) == found["cases"].keys()
    assert record == script.merged({}, record)


# --- steps of an engine -----------------------------------------------------------------------------------------------


def test_steps_are_measured_without_graphs_and_with_one(script: ModuleType) -> None:
    engine = sys.modules["gpu_engine"]
    found = engine.measure_steps(engine.TINY_WORKLOAD, torch.device("cpu"), "cpu")
    assert {"off": "", "decode": ""} == {name: each.reason for name, each in found.items()}
    assert all(each.seconds > 0 and each.busy_seconds > 0 for each in found.values())
    record = {"name": "some", "graphs": {name: attrs.asdict(each) for name, each in found.items()}}
    assert 2 == "\n".join(sys.modules["gpu_report"]._steps(record)).count("| `kvframe-cpu:cpu` |")


def test_steps_that_cannot_be_measured_say_why(script: ModuleType) -> None:
    engine = sys.modules["gpu_engine"]
    found = engine.measure_steps(engine.TINY_WORKLOAD, torch.device("cpu"), "nothing")
    record = {"name": "some", "graphs": {name: attrs.asdict(each) for name, each in found.items()}}
    assert 8 == "\n".join(sys.modules["gpu_report"]._steps(record)).count("'nothing'")


def test_time_that_kernels_share_is_counted_once(script: ModuleType) -> None:
    engine = sys.modules["gpu_engine"]
    assert pytest.approx(9e-6) == engine.covered([(10, 14), (0, 4), (2, 5), (3, 4)])
    assert 0.0 == engine.covered([])


class Wrong(TorchBackend):
    def forward(self, *args: Any) -> torch.Tensor:
        return 1.1 * super().forward(*args)


class Raising(TorchBackend):
    def forward(self, *args: Any) -> torch.Tensor:
        raise RuntimeError("no kernel")


@pytest.mark.parametrize(("backend", "reason"), [(Wrong, "wrong"), (Raising, "RuntimeError: no kernel")])
def test_what_computes_something_else_or_fails_is_not_timed(
    backend: type[TorchBackend], reason: str, measuring: ModuleType
) -> None:
    case = sys.modules["gpu_cases"].TINY[0]
    measured = measuring.measure(case, backend, load_plugins().registry, torch.device("cpu"))
    assert (None, reason) == (measured.seconds, measured.reason)


def test_a_backend_that_took_its_share_of_the_time_leaves_the_rest_to_the_others(measuring: ModuleType) -> None:
    case, spent = sys.modules["gpu_cases"].TINY[2], {"slow": 61.0, "torch": 0.0}
    backends = {"slow": TorchBackend, "torch": TorchBackend}
    found = measuring.measure_case(case, backends, load_plugins().registry, torch.device("cpu"), spent)
    assert (None, "out of time") == (found["slow"].seconds, found["slow"].reason)
    assert found["torch"].seconds > 0
    assert spent["torch"] > 0


def test_a_layer_that_a_backend_refuses_is_left_out(measuring: ModuleType) -> None:
    latents = sys.modules["gpu_cases"].TINY[-1]
    assert measuring.measure(latents, TorchBackend, load_plugins().registry, torch.device("cpu")) is None


def test_what_a_backend_would_read_from_copies_is_left_out(measuring: ModuleType) -> None:
    stored = attrs.evolve(sys.modules["gpu_cases"].TINY[0], format="fp8_tensor")
    assert "format" == measuring.why_refused(stored, TorchBackend, load_plugins().registry, "cpu")


# --- what only a GPU times, on a CPU ----------------------------------------------------------------------------------


class Triton(TritonBackend):
    capabilities = attrs.evolve(TritonBackend.capabilities, devices=frozenset({"cpu"}))


class TritonMLA(TritonMLABackend):
    capabilities = attrs.evolve(TritonMLABackend.capabilities, devices=frozenset({"cpu"}))


interpreted = pytest.mark.skipif(
    not knobs.runtime.interpret, reason="a CUDA device is there, on which the script itself is run"
)


@pytest.fixture
def _untimed(measuring: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = sys.modules["gpu_timing"].Timing(seconds=1.0, host_seconds=1.0, how="clock")
    monkeypatch.setattr(measuring, "time_calls", lambda calls, device: timing)
    monkeypatch.setattr(sys.modules["gpu_steps"], "MAX_ROTATION", 3)  # sets of pages, which an interpreter fills


@interpreted
@pytest.mark.usefixtures("_untimed")
def test_tritons_kernels_compute_every_kind_of_case(measuring: ModuleType) -> None:
    *tiny, latents = sys.modules["gpu_cases"].TINY
    stored = [attrs.evolve(tiny[0], format=name) for name in ("fp8_tensor", "int8_token_head")]
    served = [*((Triton, case) for case in (*tiny, *stored)), (TritonMLA, latents)]
    for backend, case in served:
        found = measuring.measure(case, backend, load_plugins().registry, torch.device("cpu"))
        assert ("", 1.0) == (found.reason, found.seconds)


@interpreted
@pytest.mark.usefixtures("_untimed")
def test_the_kernel_of_states_is_measured_beside_plain_torch(measuring: ModuleType) -> None:
    cases = sys.modules["gpu_cases"]
    case = cases.StateCase(
        name="tiny", group="tiny", requests=cases.decodes(2, 1), num_heads=2, head_size=16, state_size=16
    )
    found = measuring.measure_states(case, torch.device("cpu"))
    assert {"kernel": "", "plain torch": ""} == {name: each.reason for name, each in found.items()}


@pytest.mark.parametrize("backend", [TorchBackend, TritonBackend, TritonMLABackend])
def test_metadata_that_is_built_on_the_host_is_brought_to_the_device(
    backend: type[AttentionBackend], script: ModuleType
) -> None:
    steps, cases, there = sys.modules["gpu_steps"], sys.modules["gpu_cases"], torch.device("meta")
    case = cases.TINY[-1 if "latent" in backend.capabilities.state else 0]
    layer = steps.make_layer(case, 16, load_plugins().registry)
    builder = backend([layer], there).make_builder()
    assert builder.on_host
    built = steps.build_on_device(builder, steps.make_metadata(case.requests, 16), Staging(there))
    assert not host_tensors(built)


# --- the committed page -----------------------------------------------------------------------------------------------


def test_the_committed_page_has_a_row_for_every_case(script: ModuleType) -> None:
    path = BENCHMARKS / "results" / "gpu.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    page = (BENCHMARKS / "results" / "gpu.md").read_text(encoding="utf-8")
    assert script.write_report(record, tuple(script.cases())) == page
    assert all(f"| {case.name} |" in page for case in script.cases())


def test_cases_without_a_figure_are_rows_that_say_so(results: Path, script: ModuleType) -> None:
    page = script.write_report(record_of(results), tuple(script.cases()))
    assert "| 16 x 2k | 31.3 | not measured yet |" in page


# --- the shell script -------------------------------------------------------------------------------------------------


def test_packages_are_found_without_being_installed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu_environment.py"), str(tmp_path)]
    sources = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
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
    done = subprocess.run([str(BENCHMARKS / "gpu.sh"), "--help"], capture_output=True, text=True, check=False)
    assert 0 == done.returncode, done.stderr
    assert "benchmarks/gpu.sh [--wheels FOLDER] [--out FOLDER]" in done.stdout
    assert 0 == subprocess.run(["bash", "-n", str(BENCHMARKS / "gpu.sh")], check=False).returncode


def test_what_the_script_calls_is_there(script: ModuleType) -> None:
    text = (BENCHMARKS / "gpu.sh").read_text(encoding="utf-8")
    called = re.findall(r"benchmarks/(\w+)\.py((?: --\w+| \"\$\w+\"| \d+)*)", text)
    assert {"gpu", "gpu_environment"} == {name for name, _ in called}
    known = {option for parameter in script.main.params for option in parameter.opts}
    assert (
        known >= {option for name, given in called if name == "gpu" for option in re.findall(r"--\w+", given)} > set()
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
    (find,) = re.findall(r"< <\((grep .+)\)$", (BENCHMARKS / "gpu.sh").read_text(encoding="utf-8"), re.MULTILINE)
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
    assert {*found} - {"tests/attention/test_steps_on_a_gpu.py"} == with_tests


def markers() -> list[str]:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    found: list[str] = options["markers"]
    return found
