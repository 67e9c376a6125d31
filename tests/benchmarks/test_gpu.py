"""The benchmark of a GPU: its floors, its page, its checks; the script itself runs on a CPU over small cases."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from triton import knobs

from benchmarks.attention import shapes
from benchmarks.engine.workloads import Workload
from benchmarks.gpu import cases, compile_ahead, engine, engines, measure, steps, suite, summary, tested
from benchmarks.gpu.cases import Ceilings
from benchmarks.harness.models import save_random
from kvframe import Stack
from tests.benchmarks.calling import RESULTS, ROOT, measured, page_of, record_of
from tests.programs import IMPORTED, run_program


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_steps_are_measured_in_each_mode() -> None:
    modes = ("off", "decode", "decode, overlap, compiled")
    found = engine.measure_steps(engine.TINY_WORKLOAD, torch.device("cpu"), "cpu", modes)
    assert dict.fromkeys(modes, "") == {name: each["reason"] for name, each in found.items()}
    assert all(each["seconds"] > 0 and each["busy_seconds"] > 0 for each in found.values())
    record = {"name": "some", "graphs": found}
    assert len(modes) == suite._steps(record).count("| `kvframe-cpu:cpu` |")


def test_the_longest_kernels_are_named_without_their_templates() -> None:
    work = engine.Work(1.0, {f"kernel {number}": float(number) for number in range(engine.MAX_KERNELS + 3)})
    assert (engine.MAX_KERNELS, ("kernel 14", 14.0)) == (len(work.longest_kernels()), work.longest_kernels()[0])
    full = (
        "void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, at::native::MulFunctor<float>>(int)"
    )
    assert "vectorized_elementwise_kernel (MulFunctor)" == engine.short_name(full)
    assert ["_fwd_kernel", "Memcpy DtoH"] == [
        engine.short_name(name) for name in ("_fwd_kernel", "Memcpy DtoH (a -> b)")
    ]
    found = {
        "off": {"seconds": 2.0, "busy_seconds": 1.0, "kernels": {"slow": 0.5}},
        "decode": engine.not_measured("no"),
    }
    assert "| `slow` | 500,000.0 | 50.0 % |" in "\n".join(suite._kernels({"graphs": found}))


# --- whole engines ----------------------------------------------------------------------------------------------------


def test_whole_engines_are_measured_beside_transformers_and_the_floor(tmp_path: Path) -> None:
    measured(tmp_path, "gpu.engines", "--workload", "tiny-llama", "--workload", "tiny-states", "--repeats", "1")
    found = record_of("gpu_engines", tmp_path)["workloads"]
    systems = {"tiny-llama": "transformers continuous batching", "tiny-states": "transformers generate()"}
    assert {name: {"kvframe", other} for name, other in systems.items()} == {
        name: {*each["systems"]} for name, each in found.items()
    }
    for each in found.values():
        assert all(figures["speed"][0] > 0 and 1 == figures["equal"] for figures in each["systems"].values())
    assert "| kvframe |" in page_of("gpu_engines", tmp_path)


def test_the_floor_reads_weights_and_live_tokens_once_for_each_decode(tmp_path: Path) -> None:
    save_random("bench-llama-tiny", tmp_path)
    workload = Workload(
        name="tiny", model="bench-llama-tiny", memory="1MiB", num_prompts=2, shortest=10, num_new_tokens=3
    )
    stack = Stack.from_mapping({"model": {"device": "cpu", "dtype": "float32"}})
    # Embedding and head of 256 x 64; two layers with heads of 8, of 8 queries and 4 keys and values.
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    inner, head = 2 * layer + 64, 256 * 64
    caches = [2 * 2 * (n * 2 * 4 * 8) * 4 for n in (11, 12)]  # requests, layers; keys and values of n tokens
    slow_copies = Ceilings(bytes_per_second=1.0, flops_per_second=1e12)
    least = engines.floor(workload, tmp_path, stack, slow_copies)
    assert 2 * 4 * (inner + head) + sum(caches) == least.decodes
    assert 2 * inner * 20 / 1e12 == least.prompts


def test_the_table_of_aims_says_what_is_reached_and_what_is_not_measured(tmp_path: Path) -> None:
    step = {"seconds": 0.004, "busy_seconds": 0.0039}
    (tmp_path / "gpu.json").write_text(json.dumps({"engine": {"graphs": {"off": step}}, "cases": {}}), encoding="utf-8")
    (tmp_path / "gpu_tests.json").write_text(
        '{"test_some.py::test_a": {"passed": 3, "not begun": 2}}', encoding="utf-8"
    )
    table = summary.write_summary(tmp_path)
    assert "| share of a step of 128 decodes in which the device waits | 0.025 | ≤ 0.03 | yes |" in table
    assert "| llama-64, beside transformers | not measured yet | ≥ 1.5 |  |" in table
    assert "3 passed, 0 failed, 0 skipped, 2 not begun" in table
    known = {case.key for case in cases.cases()}
    assert known >= {part for aim in summary.LAYERS for part in _strings_in(aim.compute) if ": " in part}
    assert {each.name for each in engines.WORKLOADS} >= {aim.what.partition(",")[0] for aim in summary.ENGINES}


def _strings_in(function: Any) -> list[str]:
    return [cell.cell_contents for cell in function.__closure__ or () if isinstance(cell.cell_contents, str)]


# --- the tests on a device --------------------------------------------------------------------------------------------

SOME_TESTS = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_a(number): assert number != 1

def test_b(): pass

def test_c(): raise KeyboardInterrupt
"""


def test_what_never_passed_on_a_device_runs_first_and_what_did_not_begin_is_listed(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    once = "{'test_some.py::test_b': {'passed': 1}, 'test_some.py::test_c': {'passed': 2, 'not begun': 1}}"
    record.write_text(once.replace("'", '"'), encoding="utf-8")
    (tmp_path / "test_some.py").write_text(SOME_TESTS, encoding="utf-8")
    options = ("-p", "benchmarks.gpu.tested", "--gpu-record", "record.json", "-v", "-p", "no:cacheprovider")
    printed = run_program(
        "-m",
        "pytest",
        *IMPORTED,
        *options,
        "-c",
        os.devnull,
        "--rootdir",
        ".",
        cwd=tmp_path,
        environment={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout
    order = ("test_a[0] PASSED", "test_a[1] FAILED", "test_a[2] PASSED", "test_c", "tests that did not begin")
    found = [printed.index(text) for text in order]
    assert sorted(found) == found
    assert re.search(r"1 test_some.py::test_b\n *1 test_some.py::test_c", printed)
    counts = {
        "test_some.py::test_a": {"passed": 2, "failed": 1},
        "test_some.py::test_b": {"not begun": 1},
        "test_some.py::test_c": {"not begun": 1},
    }
    assert counts == tested.read_record(record)


# --- kernels that are compiled before a GPU is there ------------------------------------------------------------------


def test_the_modules_of_flashinfer_are_those_of_tested_and_measured_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("flashinfer", "flashinfer.mla", "flashinfer.jit", "flashinfer.jit.cpp_ext", "flashinfer.jit.env")
    library = {name: ModuleType(name) for name in names}
    vars(library["flashinfer.jit"])["env"] = library["flashinfer.jit.env"]
    vars(library["flashinfer.jit.cpp_ext"])["get_cuda_path"] = str
    for kind in ("decode", "prefill", "mla"):
        vars(library["flashinfer.jit"])[f"gen_batch_{kind}_module"] = partial(_module, kind)
    for name, module in library.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in [name for name in sys.modules if name.startswith("kvframe_flashinfer.") and "plugin" not in name]:
        monkeypatch.delitem(sys.modules, name)
    done = CliRunner().invoke(compile_ahead.main, ["folder", "--list"], catch_exceptions=False)
    for name in [name for name in sys.modules if name.startswith("kvframe_flashinfer.") and "plugin" not in name]:
        del sys.modules[name]
    listed = done.stdout.splitlines()
    assert len({*listed}) == len(listed)
    assert {"decode 64 bfloat16 window", "prefill fa2 64 float8_e4m3fn cap", "mla fa3 512"} < {*listed}
    assert {"decode 128 bfloat16", "prefill fa3 128 bfloat16", "decode 128 float8_e4m3fn"} < {*listed}
    assert not {name for name in listed if "fa3" in name and "float8" in name}


def _module(kind: str, *arguments: Any, **options: Any) -> SimpleNamespace:
    if kind == "mla":
        return SimpleNamespace(name=f"mla {arguments[0]} {arguments[5]}")
    parts = [kind, *arguments, str(options["head_dim_qk"]), str(options["dtype_kv"]).removeprefix("torch.")]
    parts += ["window"] * options["use_sliding_window"] + ["cap"] * options["use_logits_soft_cap"]
    return SimpleNamespace(name=" ".join(parts))


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
    commands = {"suite": suite.main, "engines": engines.main, "summary": summary.main}
    assert {*commands, "environment"} == {name for name, _ in called}
    for name, command in commands.items():
        known = {option for parameter in command.params for option in parameter.opts}
        options = [option for each, given in called if each == name for option in re.findall(r"--\w+", given)]
        assert known >= {*options} > set()
    assert "-p benchmarks.gpu.tested --gpu-record" in text
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
