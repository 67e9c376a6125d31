"""Measure serving over HTTP: ``kvframe serve`` beside the engine alone and ``transformers serve``.

See benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.engine.serving import KVFRAME, Engines, load, serve, setting_of, start_servers
from benchmarks.engine.workloads import Workload
from benchmarks.harness import options
from benchmarks.harness.pages import Column, case_page, figures
from benchmarks.harness.record import benchmark, by_turns, counted, in_columns, measure_each, ratios

ALONE, SERVED, PEER = "the engine alone", "kvframe serve", "transformers serve"
SYSTEMS = (ALONE, SERVED, PEER)
AIM = 0.95
"""The least share of the engine's own speed that the server keeps at 64 streams."""

LLAMA: dict[str, Any] = {"model": "bench-llama-100m", "memory": "512MiB", "shortest": 64, "num_new_tokens": 64}
BATCHES = (
    Workload(name="llama-64", **LLAMA, num_prompts=64),
    Workload(name="llama-1", **LLAMA, num_prompts=1),
    Workload(name="tiny", model="bench-llama-tiny", memory="64MiB", num_prompts=4, shortest=64, num_new_tokens=8),
)
"""Streams that begin at once."""


def with_tokenizer(path: Path, vocab_size: int, folder: Path) -> Path:
    """Return a copy of a checkpoint with a tokenizer whose token ``i`` is the word ``ti``."""
    for file in path.iterdir():
        (folder / file.name).symlink_to(file)
    words = {f"t{index}": index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, "t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@contextmanager
def running(system: str, path: Path, batch: Workload, threads: int) -> Iterator[int]:
    """Run a server; yield its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    bin_folder = Path(sys.executable).parent
    if system == SERVED:
        stack = path / "stack.toml"
        stack.write_text(f'[cache]\nmemory = "{batch.memory}"\n[limits]\nmax_num_seqs = {batch.num_prompts}\n')
        command = [bin_folder / "kvframe", "serve", path, "--stack", stack, "--served-name", str(path)]
    else:
        command = [bin_folder / "transformers", "serve", path, "--continuous-batching", "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    command += ["--port", str(port), *(["--host", "127.0.0.1"] if system == PEER else [])]
    quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*map(str, command)], env=environment, **quiet)
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (urllib.error.URLError, ConnectionError):
                if process.poll() is not None:
                    sys.exit(f"{system} ended with the exit code {process.returncode}")
                time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait(30)


async def stream_all(port: int, model: str, prompts: Sequence[Sequence[int]], num_new_tokens: int) -> dict[str, Any]:
    """Start all streams at once; return the seconds to the end of all, and the median seconds to a first token."""
    begun = time.perf_counter()
    streams = await asyncio.gather(*(_stream(port, model, prompt, num_new_tokens) for prompt in prompts))
    return {
        "seconds": max(last for _, last in streams) - begun,
        "first_seconds": statistics.median(first for first, _ in streams) - begun,
    }


async def _stream(port: int, model: str, prompt: Sequence[int], num_new_tokens: int) -> tuple[float, float]:
    """Return the times at which the first part of a stream came, and at which the stream ended."""
    request = {"model": model, "stream": True, "max_tokens": num_new_tokens, "temperature": 0}
    request["stream_options"] = {"include_usage": True}
    body = json.dumps({**request, "prompt": " ".join(f"t{token}" for token in prompt)}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    first, parts = 0.0, b""
    while part := await reader.read(1 << 16):
        if not first and b"data: " in part:
            first = time.perf_counter()
        parts = parts[-4096:] + part
    if b'"completion_tokens":%d' % num_new_tokens not in parts:
        sys.exit(f"a stream ended without its {num_new_tokens} tokens: {parts[-500:].decode(errors='replace')}")
    writer.close()
    return first, time.perf_counter()


def measure(
    batch: Workload, engines: Engines, repeats: int, threads: int, advance: Callable[[int], object]
) -> dict[str, Any]:
    """Let the engine alone and the servers take turns on a batch."""
    setting, config = setting_of(batch)
    vocab_size, num_new_tokens = config["vocab_size"], batch.num_new_tokens
    load(engines, setting)
    with TemporaryDirectory() as folder, ExitStack() as servers:
        served = with_tokenizer(Path(setting.path), vocab_size, Path(folder))
        ports = {name: servers.enter_context(running(name, served, batch, threads)) for name in (SERVED, PEER)}

        def run(name: str, repeat: int) -> dict[str, Any]:
            prompts = batch.prompts(repeat, vocab_size)
            if name != ALONE:
                return asyncio.run(stream_all(ports[name], str(served), prompts, num_new_tokens))
            alone = serve(engines, KVFRAME, prompts, num_new_tokens)
            return {key: alone[key] for key in ("seconds", "first_seconds")}

        turns = counted(by_turns(SYSTEMS, repeats, run, advance, warm_up=True))
    systems = {name: in_columns(rounds) for name, rounds in turns.items()}
    for columns in systems.values():
        columns["tokens_per_second"] = [batch.num_prompts * num_new_tokens / seconds for seconds in columns["seconds"]]
        columns["share_of_engine"] = ratios(systems[ALONE]["seconds"], columns["seconds"])
    described = {"model": batch.model, "num_streams": batch.num_prompts, "num_prompt_tokens": batch.shortest}
    return {"batch": {**described, "num_new_tokens": num_new_tokens}, "systems": systems}


COLUMNS: dict[str, Column] = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "share_of_engine": ("of the engine's own", "{:.2f}"),
    "first_seconds": ("first token, ms", "{:,.0f}", 1000),
}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    note = "float32; all streams begin at once, greedy. The client reads streams without parsing them."
    return case_page("Serving over HTTP", record, "batches", _section, note)


def _section(measured: Mapping[str, Any]) -> Iterator[str]:
    batch = measured["batch"]
    yield (
        f"{batch['num_streams']} streams of {batch['num_prompt_tokens']} + {batch['num_new_tokens']} "
        f"tokens, {batch['model']}. Aim: {AIM} of the engine's own speed."
    )
    yield figures(measured["systems"], COLUMNS, "system")


@benchmark("server", write_report, cases="batches")
@options.repeats(7)
@options.threads(1)
@options.choose("--batch", "batches", BATCHES)
def main(repeats: int, threads: int, batches: Sequence[Workload]) -> dict[str, Any]:
    """Measure tokens per second and the time to a first token, through servers and without."""
    with start_servers((KVFRAME,), threads) as engines:
        results = measure_each(
            batches, repeats + 1, lambda batch, advance: measure(batch, engines, repeats, threads, advance)
        )
    return {"repeats": repeats, "batches": results}


if __name__ == "__main__":
    main()
