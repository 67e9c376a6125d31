"""Kernels read and write no memory but that of their step, on drawn layers and steps; the check finds one that does."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import installed_formats
from kvframe_testing.laws import ConformanceError

from benchmarks.attention import fuzz
from kvframe.contract import AttentionBackend
from kvframe.loading.plugins import load_plugins
from tests.attention import checked_kernels
from tests.attention.drawn_cases import SMALL, WrongHost, draw_case, usual_case

SANITIZED = checked_kernels.sanitizer_environment()


@pytest.mark.skipif(SANITIZED is None, reason="the compiler lacks the address sanitizer")
@pytest.mark.parametrize(
    "name",
    [
        "C++ for native",
        *(pytest.param(name, marks=pytest.mark.whole) for name in fuzz.KERNELS if name != "C++ for native"),
    ],
)
def test_drawn_cases(name: str, tmp_path: Path) -> None:
    found = fuzz.run(fuzz.KERNELS[name], 0, 25, tmp_path)
    assert ({}, "reported", 25) == (found["failures"], found["planted"], found["cases"])


ODD_ROWS = """
import sys
from pathlib import Path

from kvframe.loading.plugins import load_plugins
from kvframe_testing.case import Case, Request
from kvframe_testing.conformance import check_backend
from kvframe_testing.grid import make_layer
from kvframe_testing.hosts import OtherHost
from tests.attention import checked_kernels

checked_kernels.use_library(Path(sys.argv[1]))
backend_class = load_plugins().registry.backends.load("cpu")
layer = make_layer(backend_class.capabilities, dtype="bfloat16", head_size=64, head_size_v=3)
case = Case(name="odd rows", layer=layer, requests=(Request(0, 20),))
check_backend(backend_class, case, host=OtherHost("head_major_interleaved"))
"""


@pytest.mark.skipif(SANITIZED is None, reason="the compiler lacks the address sanitizer")
def test_pairs_of_bfloat16_at_addresses_between_those_of_floats() -> None:
    library = checked_kernels.build_sanitized("native")
    command = [sys.executable, "-c", ODD_ROWS, str(library)]
    process = subprocess.run(command, env=SANITIZED, cwd=fuzz.ROOT, capture_output=True, text=True, check=False)
    assert (0, "") == (process.returncode, fuzz.report_in(process.stderr))


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="the interpreter runs the kernels that are checked")
@pytest.mark.parametrize("name", ["triton", "triton_mla"])
def test_drawn_cases_in_the_interpreter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend_class: type[AttentionBackend] = load_plugins().registry.backends.load(name)
    able = backend_class.capabilities
    able = attrs.evolve(able, devices={"cpu"}, dtypes=able.dtypes - {"bfloat16"})
    monkeypatch.setattr(backend_class, "capabilities", able)
    for seed in range(8):
        case, host = draw_case(seed, backend_class, formats=installed_formats(), sizes=SMALL)
        with checked_kernels.triton_addresses_checked():
            check_backend(backend_class, case, host=host)
    with pytest.raises(MemoryError, match="outside of its tensors"), checked_kernels.triton_addresses_checked():
        check_backend(backend_class, usual_case(backend_class), host=WrongHost())


def test_a_report_names_the_kernel() -> None:
    text = (
        "a line\n==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1\n    #0 0x2 in kvframe::load(float)"
    )
    expected = "==7==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x1 #0 0x2 in kvframe::load(float)"
    assert expected == fuzz.report_in(text)
    assert "b\nc\nd" == fuzz.report_in("a\nb\nc\nd")


def test_a_process_that_ends_within_a_case_has_found_something_there(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = 'import sys; print(\'{"seed": 3, "traits": ["mask causal"]}\', flush=True); sys.exit("kvframe:: broke")'
    monkeypatch.setattr(fuzz, "COMMAND", (sys.executable, "-c", worker))
    failures: dict[int, str] = {}
    assert {"last": 3, "planted": ""} == fuzz.call(["cpu", "0", "4"], os.environ, Counter(), failures)
    assert {3: "kvframe:: broke"} == failures


def test_what_a_loop_raises_comes_before_what_follows_from_it() -> None:
    hook = sys.unraisablehook

    def run_loop() -> None:
        sys.unraisablehook(SimpleNamespace(exc_value=IndexError("index is out of bounds")))  # type: ignore[arg-type]
        raise ConformanceError("a wrong result")

    with pytest.raises(MemoryError, match="beside an array"), checked_kernels.numba_errors_raised():
        run_loop()
    assert sys.unraisablehook is hook
