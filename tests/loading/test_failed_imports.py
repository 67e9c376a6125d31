"""A broken distribution makes ``import torch`` fail: commands name that distribution, and say what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvframe.contract.errors import PluginError
from kvframe.contract.foreign import call
from tests.loading.fake_distributions import FakeSite

LAYERS = Path(__file__).parents[2] / "examples" / "layers" / "llama_3_1_8b.toml"
RAISES = "def start():\n    raise {error}\n"


def run_beside(site: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(site)])
    return subprocess.run(
        [sys.executable, "-m", "kvframe", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": path, **environment},
    )


def sentence_of(process: subprocess.CompletedProcess[str]) -> str:
    """Return the one line on stderr after a user's mistake."""
    assert 2 == process.returncode, process.stderr
    (line,) = process.stderr.splitlines()
    return line.removeprefix("kvframe: error: ")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[scripts]\nno value\n", "TypeError"),
        pytest.param(b"[scripts]\n\xff = a\n", "UnicodeDecodeError", marks=pytest.mark.whole),
    ],
)
def test_an_unreadable_entry_point_file_of_another_distribution_is_named(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    FakeSite(tmp_path).write_metadata("bad-neighbour", "")
    (tmp_path / "bad_neighbour-0.1.dist-info" / "entry_points.txt").write_bytes(content)
    sentence = sentence_of(run_beside(tmp_path, "explain", LAYERS))
    assert sentence.startswith(f"the distribution 'bad-neighbour' in {tmp_path} has an entry_points.txt that cannot be")
    assert reason in sentence
    assert "reinstall or uninstall that distribution, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0" in sentence


def test_the_advice_of_the_sentence_helps_and_commands_without_torch_run_anyway(tmp_path: Path) -> None:
    FakeSite(tmp_path).write_metadata("bad-neighbour", "[scripts]\nno value\n")
    assert 0 == run_beside(tmp_path, "explain", LAYERS, TORCH_DEVICE_BACKEND_AUTOLOAD="0").returncode
    assert 0 == run_beside(tmp_path, "plan", LAYERS).returncode  # it loads no torch


def test_a_device_of_torch_that_fails_to_load_is_named(tmp_path: Path) -> None:
    site = FakeSite(tmp_path)
    site.write_metadata("bad-device", "[torch.backends]\ndevice = bad_device:start")
    (tmp_path / "bad_device.py").write_text(RAISES.format(error="OSError('boom')"))
    sentence = sentence_of(run_beside(tmp_path, "explain", LAYERS))
    assert sentence.startswith("torch cannot be imported: RuntimeError: Failed to load the backend extension: device.")
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in sentence


def test_a_model_adapter_that_cannot_import_torch_says_which_distribution_is_at_fault(tmp_path: Path) -> None:
    FakeSite(tmp_path).write_metadata("bad-neighbour", "[scripts]\nno value\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    assert "the distribution 'bad-neighbour' in" in sentence_of(run_beside(tmp_path, "plan", tmp_path / "model"))


def test_torch_that_is_not_installed_is_said() -> None:
    def import_it() -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    with pytest.raises(PluginError, match=r"^a hook failed: torch is not installed; try: pip install torch$"):
        call("a hook", import_it)


def test_other_errors_are_not_taken_for_failed_imports() -> None:
    def import_it(error: Exception) -> None:
        raise error

    for error in (ValueError("boom"), ModuleNotFoundError("boom", name="other")):
        with pytest.raises(PluginError, match=r"^a hook failed: (ValueError|ModuleNotFoundError): boom$"):
            call("a hook", import_it, error)
