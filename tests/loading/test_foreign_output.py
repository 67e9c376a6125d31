"""Output that plugins print, in any way, is not mixed into kvframe's own output."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvframe.contract.foreign import call
from tests.loading.fake_distributions import MANIFEST, FakeSite

NOISE = """
import logging, os, subprocess, sys
print("printed")
os.write(1, b"written\\n")
subprocess.run([sys.executable, "-c", "print('by a child')"])
logging.basicConfig(stream=sys.stdout, force=True)
logging.getLogger("noise").error("logged")
"""
HOOK = """
@hookimpl
def kvframe_register_backends(register):
    print("printed in a hook")
    register("noisy", "kvframe_noisy.backend:Noisy")
"""
REPLACES = """
import sys
sys.stdout = open("/dev/null", "w")
"""
BACKEND = """
from kvframe.builtin.torch_reference import TorchReferenceBackend
class Noisy(TorchReferenceBackend):
    @classmethod
    def unusable_reason(cls):
        print("printed when asked")
"""
LAYERS = """
max_model_len = 64
[[layers]]
name = "layers.0"
kind = "full_attention"
num_kv_heads = 1
head_size = 8
query = { num_heads = 1, head_size = 8, scale = 1.0 }
"""


@pytest.fixture
def noisy(tmp_path: Path) -> Path:
    """A folder with a plugin that prints in every way, and one that replaces ``sys.stdout``."""
    site = FakeSite(tmp_path)
    site.add("kvframe-noisy", "noisy", MANIFEST + NOISE + HOOK, files={"backend": NOISE + BACKEND})
    site.add("kvframe-replaces", "replaces", MANIFEST + REPLACES)
    (tmp_path / "layers.toml").write_text(LAYERS)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["plugins"], {"printed", "written", "by a child", "ERROR:noise:logged", "printed in a hook"}),
        (["plan", "layers.toml", "--cache-memory", "1MiB"], {"printed", "written", "printed in a hook"}),
        (["explain", "layers.toml"], {"printed", "written", "printed in a hook", "printed when asked"}),
    ],
    ids=["plugins", "plan", "explain"],
)
def test_a_document_holds_nothing_that_a_plugin_printed(noisy: Path, arguments: list[str], printed: set[str]) -> None:
    paths = [str(noisy), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    process = subprocess.run(
        [sys.executable, "-m", "kvframe", *arguments, "--json"],
        cwd=noisy,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert 0 == process.returncode, process.stderr
    assert isinstance(json.loads(process.stdout), dict)
    assert printed <= set(process.stderr.splitlines())


def test_output_of_a_call_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    call("it", print, "from a plugin")
    print("from kvframe")
    assert ("from kvframe\n", "from a plugin\n") == capsys.readouterr()


def test_a_call_within_a_call_leaves_stdout_as_it_was() -> None:
    before = sys.stdout
    call("it", lambda: call("inner", print, end=""))
    assert sys.stdout is before


def test_stdout_that_a_plugin_replaced_is_put_back() -> None:
    before = sys.stdout

    def replace() -> None:
        sys.stdout = io.StringIO()

    call("it", replace)
    assert sys.stdout is before


def test_calls_of_several_threads_leave_stdout_as_it_was() -> None:
    before, first_is_in, second_is_in = sys.stdout, threading.Event(), threading.Event()

    def first() -> None:
        first_is_in.set()
        second_is_in.wait(10)

    def second() -> Any:
        second_is_in.set()
        thread.join(10)

    thread = threading.Thread(target=call, args=("first", first))
    thread.start()
    first_is_in.wait(10)
    call("second", second)  # ends after the first, which began before it
    assert sys.stdout is before
