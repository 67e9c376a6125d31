"""vLLM's server on kvframe's layers: 64 requests at once over HTTP, and a start that fails with one clear error."""

from __future__ import annotations

import importlib.util
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

NUM_NEW = 24


@contextmanager
def served(
    model: Path, stack: str, log: Path, path_of_python: str, options: str = ""
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run ``vllm serve`` with a path for Python; yield its address and its process once it is up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = log.with_suffix(".toml")
    path.write_text(stack, encoding="utf-8")
    variables = {"KVFRAME_STACK": str(path), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    variables |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}
    variables["PYTHONPATH"] = path_of_python
    options += " --skip-tokenizer-init --enforce-eager --dtype float32 --max-model-len 256 --block-size 32"
    options += f" --max-num-batched-tokens 96 --max-num-seqs 64 --host 127.0.0.1 --port {port}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options.split()]
    with log.open("w", encoding="utf-8") as output:
        server = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=output, stderr=subprocess.STDOUT, text=True
        )
        try:
            while "Application startup complete" not in log.read_text(encoding="utf-8"):
                try:
                    server.wait(timeout=0.5)
                except subprocess.TimeoutExpired:
                    continue
                raise AssertionError(log.read_text(encoding="utf-8")[-3000:])
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.terminate()
            server.wait(timeout=60)


def complete(client: Any, model: Path, prompt: list[int]) -> list[int]:
    extra = {"ignore_eos": True, "detokenize": False, "return_token_ids": True}
    completion = client.completions.create(
        model=str(model), prompt=prompt, max_tokens=NUM_NEW, temperature=0.0, extra_body=extra
    )
    tokens: list[int] = completion.choices[0].token_ids
    return tokens


def counters(address: str) -> dict[str, float]:
    """Return what the server counted, summed over labels."""
    values: dict[str, float] = {}
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        for line in response.read().decode().splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
    return values


def test_a_server_answers_64_requests_at_once_with_the_tokens_of_vllms_own_backend(
    vllm_runs: Any, tmp_path: Path
) -> None:
    """The cache has pages for few of them, so that requests are preempted."""
    from openai import OpenAI

    model, prompts = vllm_runs.make_model("Mistral"), vllm_runs.make_prompts(64)
    expected = vllm_runs.serve(model, {"engine": vllm_runs.engine, "prompts": prompts, "max_tokens": NUM_NEW}, None)
    paths, options = vllm_runs.on_path([vllm_runs.make_metadata(tmp_path)]), "--num-gpu-blocks-override 24"
    with served(model, vllm_runs.stack, tmp_path / "log", paths, options) as (address, _):
        with (
            OpenAI(base_url=f"{address}/v1", api_key="none", timeout=240, max_retries=0) as client,
            ThreadPoolExecutor(64) as pool,
        ):
            answers = [*pool.map(lambda prompt: complete(client, model, prompt), prompts)]
        values = counters(address)
    assert expected["tokens"] == answers
    assert values["vllm:num_preemptions_total"] > 0
    assert values["vllm:prefix_cache_hits_total"] > 500
    assert "kvframe serves 2 layers in blocks of 32 tokens by kvframe-cpu:cpu" in (tmp_path / "log").read_text("utf-8")


def test_a_backend_that_raises_ends_the_requests_and_the_server_and_is_named_in_its_log(
    vllm_runs: Any, tmp_path: Path
) -> None:
    from openai import APIError, OpenAI

    plugins = vllm_runs.make_plugin(
        tmp_path / "plugins", "raising", vllm_runs.raising, "vllm.general_plugins", "raising:register"
    )
    model = vllm_runs.make_model("Llama")
    paths = vllm_runs.on_path([vllm_runs.make_metadata(tmp_path), plugins])
    with served(model, vllm_runs.stack, tmp_path / "log", paths) as (address, server):

        def ask(prompt: list[int]) -> str:
            try:
                return f"answered {complete(client, model, prompt)}"
            except APIError as error:
                return str(error)

        with (
            OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0) as client,
            ThreadPoolExecutor(4) as pool,
        ):
            answers = [*pool.map(ask, vllm_runs.make_prompts(4))]
        assert not [answer for answer in answers if answer.startswith("answered")]
        assert not [answer for answer in answers if "timed out" in answer]
        assert server.wait(timeout=60) is not None
    log = (tmp_path / "log").read_text("utf-8")
    assert vllm_runs.failure in log
    assert "in line 10 of 'raising': ValueError: no such tile" in log


def test_a_plugin_that_raises_ends_the_start_with_its_error(vllm_runs: Any, tmp_path: Path) -> None:
    plugins = vllm_runs.make_plugin(tmp_path, "broken", "raise ValueError('no such part')", "kvframe.v1", "broken")
    stack = '[plugins]\nrequired = ["broken"]\n' + vllm_runs.stack
    settings = {"engine": vllm_runs.engine, "prompts": [[1]], "max_tokens": 1}
    process = vllm_runs.start(vllm_runs.make_model("Llama"), settings, stack, [plugins])
    assert process.returncode != 0
    assert "broken" in process.stderr
    assert "no such part" in process.stderr
