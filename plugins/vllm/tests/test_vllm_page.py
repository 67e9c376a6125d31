"""The page on one stack from one process to several: its commands are run, in their order, and print what it says."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
ENGINE = ROOT / ".venv" / "bin"
PAGE = (ROOT / "docs" / "from-one-machine-to-many.md").read_text(encoding="utf-8")

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.skipif(not (ENGINE / "kvframe").exists(), reason="needs kvframe's engine in .venv: make setup"),
    pytest.mark.filterwarnings("ignore"),
]

# One step of training, and then layers that weigh more than the token itself: what attention sees decides each token.
MAKE_MODEL = """
import sys
from pathlib import Path

import torch
import transformers

sys.path.insert(0, "examples/demo")
import make_model

path = Path(sys.argv[1])
make_model.make_model(path, make_model.Recipe(steps=1))
model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
with torch.no_grad():
    for name, weight in model.named_parameters():
        if "post_" in name:
            weight.add_(30)
model.save_pretrained(path)
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [line for line in lines if not line.startswith("pip install")]


@contextmanager
def running(command: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a server until it is no longer needed, once it is up."""
    log = folder / "server.log"
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(
            ["bash", "-c", f"exec env {command}"], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while "Application startup complete" not in log.read_text(encoding="utf-8"):
                try:
                    server.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError(log.read_text(encoding="utf-8")[-3000:])
            yield
            assert "kvframe serves" in log.read_text(encoding="utf-8")
        finally:
            server.terminate()
            server.wait(timeout=60)


def make_programs(folder: Path, path_of_python: str) -> None:
    """Make the programs that the page names, each from the environment that it says."""
    vllm = f"PYTHONPATH={path_of_python} exec {sys.executable} -m vllm.entrypoints.cli.main"
    programs = {
        "vllm": vllm,
        "python": f"exec {sys.executable}",
        "kvframe": f"exec {ENGINE / 'kvframe'}",
        "torchrun": f"exec {ENGINE / 'torchrun'}",
    }
    folder.mkdir()
    for name, call in programs.items():
        (folder / name).write_text(f'#!/bin/sh\n{call} "$@"\n', encoding="utf-8")
        (folder / name).chmod(0o755)


def test_every_command_of_the_page_gives_the_text_of_one_process(vllm_runs: Any, tmp_path: Path) -> None:
    make_programs(tmp_path / "bin", vllm_runs.on_path([vllm_runs.make_metadata(tmp_path)]))
    for block in blocks("toml") + blocks("python"):
        (tmp_path / block.splitlines()[0].removeprefix("# file: ")).write_text(block, encoding="utf-8")
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "OMP_NUM_THREADS": "1"}
    model = tmp_path / ".cache" / "demo-model"
    subprocess.run([ENGINE / "python", "-c", MAKE_MODEL, str(model)], cwd=ROOT, env=environment, check=True)

    def run(command: str) -> None:
        process = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert process.returncode == 0, command + process.stdout + process.stderr[-3000:]

    rest = commands()
    assert 4 == sum("vllm serve" in command or "torchrun" in command for command in rest)
    while rest:
        command = rest.pop(0)
        if "vllm serve" not in command:
            run(command)
            continue
        with running(command, tmp_path, environment):
            while rest and "vllm serve" not in rest[0]:
                run(rest.pop(0))
    # The control: without the stack, the text is another.
    plain = shlex.join(["kvframe", "generate", ".cache/demo-model", "--prompt", "def fill(self, value):"])
    run(f"{plain} --prompt 'import ' --max-new-tokens 64 > plain.txt")
    texts = [(tmp_path / f"{name}.txt").read_text() for name in ("one", "ranks", "vllm", "tensor", "pipeline", "plain")]
    assert len(texts[0]) > 100
    assert [texts[0]] * 5 == texts[:5]
    assert texts[0] != texts[5]
