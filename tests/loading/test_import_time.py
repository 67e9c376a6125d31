"""The modules that the command line loads early, counted, because times depend on the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LAYERS = """
max_model_len = 4096
[[layers]]
name = "layers.{}"
count = 2
kind = "full_attention"
num_kv_heads = 2
head_size = 64
[[layers]]
name = "layers.{}"
kind = "sliding_window"
num_kv_heads = 2
head_size = 64
window = 256
"""
HEAVY = {"torch", "transformers", "numpy", "rich"}
# 2.5 times the number of modules that the commands load today; torch alone is over a thousand.
MAX_MODULES = 600

RUN = """
import sys
from kvframe.cli import main
main(sys.argv[1:], prog_name="kvframe", standalone_mode=False)
print("\\n".join(sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["plan", "layers.toml"], ["plan", "--help"]])
def test_a_light_command_loads_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "layers.toml").write_text(LAYERS)
    process = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    loaded = set(process.stderr.split())
    assert set() == HEAVY & loaded
    assert len(loaded) < MAX_MODULES


def test_help_of_the_group_imports_no_part_of_the_flow() -> None:
    process = subprocess.run([sys.executable, "-c", RUN, "--help"], capture_output=True, text=True, check=True)
    loaded = {name for name in process.stderr.split() if name.startswith("kvframe.")}
    assert set() == loaded & {
        "kvframe_engine.engine",
        "kvframe.loading.plugins",
        "kvframe.planning.plan",
        "kvframe.planning.groups",
    }
