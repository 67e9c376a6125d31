"""vLLM's server on kvframe's layers: 64 requests at once over HTTP, and a start that fails with one clear error."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make vllm"),
    pytest.mark.filterwarnings("ignore"),
]


@contextmanager
def served(model: Path, stack: str, log: Path) -> Iterator[str]:
    """Run a server until it has answered; yield its address once it says that it is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = log.with_suffix(".toml")
    path.write_text(stack, encoding="utf-8")
    variables = {"KVFRAME_STACK": str(path), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    options = "--skip-tokenizer-init --enforce-eager --dtype float32 --max-model-len 256 --block-size 32"
    # What `vllm serve` runs; the command itself looks for a distribution vllm, and the CPU build is vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *options.split()]
    command += ["--max-num-batched-tokens", "96", "--max-num-seqs", "64", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT)
        try:
            while "Application startup complete" not in log.read_text(encoding="utf-8"):
                try:
                    server.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError(log.read_text(encoding="utf-8")[-3000:])
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(timeout=60)


def complete(address: str, model: Path, prompt: list[int]) -> list[int]:
    body = {"model": str(model), "prompt": prompt, "max_tokens": 8, "temperature": 0.0}
    body |= {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        tokens: list[int] = json.load(response)["choices"][0]["token_ids"]
        return tokens


def test_a_server_answers_64_requests_at_once_with_the_tokens_of_vllms_own_backend(
    vllm_runs: Any, tmp_path: Path
) -> None:
    model, prompts = vllm_runs.make_model("Mistral"), vllm_runs.make_prompts(64)
    settings = {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": 8}
    expected = vllm_runs.serve(model, settings, None)
    with served(model, vllm_runs.stack, tmp_path / "log") as address, ThreadPoolExecutor(64) as pool:
        found = [*pool.map(lambda prompt: complete(address, model, prompt), prompts)]
    assert expected["tokens"] == found
    assert "kvframe serves" in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_plugin_that_raises_ends_the_start_with_its_error(vllm_runs: Any, tmp_path: Path) -> None:
    installed = tmp_path / "plugins" / "broken-1.0.dist-info"
    installed.mkdir(parents=True)
    (installed.parent / "broken.py").write_text("raise ValueError('no such part')\n", encoding="utf-8")
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(
        "[kvframe.v1]\nbroken = broken\n[kvframe.v1.api]\nbroken = v1_0\n", encoding="utf-8"
    )
    stack = '[plugins]\nrequired = ["broken"]\n' + vllm_runs.stack
    settings = {"engine": vllm_runs.engine, "prompts": [[1]], "max_tokens": 1}
    done = vllm_runs.start(vllm_runs.make_model("Llama"), settings, stack, [installed.parent])
    assert done.returncode != 0
    assert "broken" in done.stderr
    assert "no such part" in done.stderr
