"""Attack a server while a friend asks it, then let 1,500 clients come and go in every way. See benchmarks/README.md."""

from __future__ import annotations

import asyncio
import collections
import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import openai
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark, progress
from benchmarks.serving.attacks import ATTACKS, FRIENDLY_KEY, HOSTILE_KEY, Attack, attack, request
from benchmarks.serving.running import ServerProcess, save_model, served

KEYS = (FRIENDLY_KEY, HOSTILE_KEY)
CLIENT_SECONDS = 5
TABLES = f"""
[cache]
memory = "16MiB"
[plugin.serve]
client_seconds = {CLIENT_SECONDS}
"""
FEW_FILES = 64
FOR_FEW_FILES = ("silent", "half a body")
NUM_PROMPTS, NUM_TOKENS = 20, 24
AT_ONCE = 24
FEWEST_ANSWERS = 10
MOST_GROWTH_MB = 20.0
"""The most that memory may grow over the last three fifths of the soak."""

WAYS = {
    "whole": (4, "read a whole answer"),
    "stream": (4, "read a stream"),
    "slow": (1, "read a stream slowly"),
    "leaves": (3, "leave a stream after its first part"),
    "resets": (2, "reset the connection at the first byte"),
    "half": (2, "send half of a body and leave"),
}
"""How clients of the soak behave: how many of 16 do, and what they do."""


def answers(model: Path) -> dict[str, str]:
    """Return prompts with the answers that transformers gives."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    replies = {}
    for index in range(NUM_PROMPTS):
        prompt = "".join(random.Random(index).choices("abcdefghijkl ", k=8 + 5 * index))
        tokens = tokenizer(prompt, return_tensors="pt")
        with torch.no_grad():
            generated = peer.generate(**tokens, max_new_tokens=NUM_TOKENS, do_sample=False)
        replies[prompt] = tokenizer.decode(generated[0, tokens["input_ids"].shape[1] :], skip_special_tokens=True)
    return replies


class Friend:
    """A client that asks again and again.

    Attributes:
        seconds: How long each answer took.
        wrong: Answers that were not transformers'.
    """

    def __init__(self, server: ServerProcess, right_answers: Mapping[str, str]) -> None:
        """Take the server, and the right answers."""
        self.seconds: list[float] = []
        self.wrong: list[str] = []
        self._server = server
        self._answers = [*right_answers.items()]

    async def ask(self) -> None:
        """Ask until this task is cancelled."""
        async with client(self._server) as asking:
            while True:
                prompt, answer = self._answers[len(self.seconds) % len(self._answers)]
                begun = time.perf_counter()
                try:
                    reply = await complete(asking, prompt)
                except openai.OpenAIError as error:
                    reply = f"{error!r} from {error.__cause__!r}"
                self.seconds.append(time.perf_counter() - begun)
                if reply != answer:
                    self.wrong.append(reply)
                await asyncio.sleep(0.02)


def client(server: ServerProcess) -> openai.AsyncOpenAI:
    """Return a friendly client."""
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=FRIENDLY_KEY, max_retries=0, timeout=60)


def fields(prompt: str) -> dict[str, Any]:
    """Return the fields of a greedy request."""
    return {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}


async def complete(client: openai.AsyncOpenAI, prompt: str) -> str:
    """Return a whole answer."""
    answer = await client.completions.create(**fields(prompt))
    return str(answer.choices[0].text)


async def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.perf_counter() + seconds
    while not condition():
        if time.perf_counter() > end:
            return False
        await asyncio.sleep(0.05)
    return True


async def suffer(server: ServerProcess, attacked: Attack, right_answers: Mapping[str, str]) -> dict[str, Any]:
    """Run an attack while a friendly client asks; return the figures of both."""
    files, memory, log = server.num_descriptors, server.memory_mb, server.log.stat().st_size
    friend, gone = Friend(server, right_answers), asyncio.Event()
    asking = asyncio.create_task(friend.ask())
    most_files, most_memory = files, memory

    async def watch() -> None:
        nonlocal most_files, most_memory
        while True:
            most_files = max(most_files, server.num_descriptors)
            most_memory = max(most_memory, server.memory_mb)
            await asyncio.sleep(0.1)

    watching = asyncio.create_task(watch())
    begun = time.perf_counter()
    attacks = [asyncio.create_task(attack(server.port, attacked, index, gone)) for index in range(attacked.connections)]
    await until(lambda: most_files > files + min(attacked.connections, 8) // 2, 10)
    has_ended = await until(lambda: server.num_descriptors <= files + 1, 120)
    seconds = time.perf_counter() - begun
    gone.set()
    connected = await asyncio.gather(*attacks)
    await until(lambda: len(friend.seconds) >= FEWEST_ANSWERS, 60)
    for task in (asking, watching):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    statuses = collections.Counter(connection.status for connection in connected)
    return {
        "what": attacked.what,
        "connections": attacked.connections,
        "sent_mb": sum(connection.num_bytes for connection in connected) / 1e6,
        "statuses": dict(sorted(statuses.items())),
        "seconds": seconds,
        "has_ended": has_ended,
        "memory_mb": [memory, most_memory, server.memory_mb],
        "descriptors": [files, most_files, server.num_descriptors],
        "log_kb": (server.log.stat().st_size - log) / 1e3,
        "friend": {
            "answers": len(friend.seconds),
            "wrong": friend.wrong,
            "median_seconds": statistics.median(friend.seconds),
            "slowest_seconds": max(friend.seconds),
        },
    }


async def come_and_go(server: ServerProcess, way: str, prompt: str) -> str | None:
    """Be one client of the soak; return its answer, if it read all of it."""
    if way in ("resets", "half"):
        data = request({**fields(prompt), "stream": True}).replace(HOSTILE_KEY.encode(), FRIENDLY_KEY.encode())
        if way == "half":
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(data[: len(data) // 2])
            await writer.drain()
            writer.close()
        else:
            await attack(
                server.port, Attack(what="", connections=1, data=lambda _: data, resets=True), 0, asyncio.Event()
            )
        return None
    async with client(server) as ours:
        if way == "whole":
            return await complete(ours, prompt)
        text = ""
        async with await ours.completions.create(**fields(prompt), stream=True) as stream:
            async for part in stream:
                text += part.choices[0].text if part.choices else ""
                if way == "leaves":
                    return None
                if way == "slow":
                    await asyncio.sleep(0.02)
        return text


def metrics_of(server: ServerProcess) -> dict[str, float]:
    """Return the server's metrics that have no label, and the blocks that requests hold as ``blocks_held``."""
    query = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {FRIENDLY_KEY}"})
    with urllib.request.urlopen(query, timeout=60) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    metrics = {name: float(value) for name, _, value in lines}
    num_held = sum(value for name, value in metrics.items() if name.startswith("kvframe_blocks_held{"))
    return {**metrics, "blocks_held": num_held}


async def soak(server: ServerProcess, right_answers: Mapping[str, str], num_requests: int) -> dict[str, Any]:
    """Let clients connect and leave; return their wrong answers, and the resources that the server still holds."""
    source = random.Random(0)
    ways = source.choices([*WAYS], [weight for weight, _ in WAYS.values()], k=num_requests)
    prompts = source.choices([*right_answers], k=num_requests)
    wrong: list[str] = []
    memory, files = [], server.num_descriptors
    async with client(server) as asking:
        await asyncio.gather(*(complete(asking, prompt) for prompt in right_answers))
    begun = time.perf_counter()
    with progress("soak", num_requests) as advance:
        fifth = max(1, num_requests // 5)
        for first in range(0, num_requests, fifth):
            waiting = [*zip(ways, prompts, strict=True)][first : first + fifth][::-1]

            async def be_clients(waiting: list[tuple[str, str]] = waiting) -> None:
                while waiting:
                    way, prompt = waiting.pop()
                    try:
                        reply = await come_and_go(server, way, prompt)
                    except openai.OpenAIError as error:
                        reply = f"{error!r} from {error.__cause__!r}"
                    if reply is not None and reply != right_answers[prompt]:
                        wrong.append(reply)
                    advance(1)

            await asyncio.gather(*(be_clients() for _ in range(AT_ONCE)))
            memory.append(server.memory_mb)
    seconds = time.perf_counter() - begun
    await until(lambda: server.num_descriptors <= files + 1 and metrics_of(server)["blocks_held"] == 0, 60)
    left = metrics_of(server)
    return {
        "requests": num_requests,
        "at_once": AT_ONCE,
        "seconds": seconds,
        "ways": dict(collections.Counter(ways)),
        "wrong": wrong,
        "generated_tokens": left["kvframe_generated_tokens_total"],
        "memory_mb": memory,
        "descriptors": [files, server.num_descriptors],
        "left": {
            "samples": left["kvframe_requests"],
            "running": left["kvframe_requests_running"],
            "waiting": left["kvframe_requests_waiting"],
            "blocks": left["blocks_held"],
            "failed steps": left["kvframe_failed_steps_total"],
        },
    }


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    soaked = record["soak"]
    attacked = [
        (
            result["what"] + (f" ({FEW_FILES} descriptors)" if name.endswith("few files") else ""),
            str(result["connections"]),
            f"{result['sent_mb']:,.1f}",
            ", ".join(f"{status} {count}" for status, count in result["statuses"].items()),
            f"{result['seconds']:.1f}",
            " / ".join(f"{value:,.0f}" for value in result["memory_mb"]),
            " / ".join(f"{value}" for value in result["descriptors"]),
            f"{result['log_kb']:,.1f}",
            f"{result['friend']['answers']}, {len(result['friend']['wrong'])} wrong",
            f"{1000 * result['friend']['median_seconds']:,.0f} / {1000 * result['friend']['slowest_seconds']:,.0f}",
        )
        for name, result in record["attacks"].items()
    ]
    columns = (
        "clients that",
        "connections",
        "MB sent",
        "answers",
        "seconds",
        "MB before / most / after",
        "descriptors before / most / after",
        "KB of log",
        "a friend's answers",
        "median / slowest, ms",
    )
    ways = [(text, str(soaked["ways"].get(way, 0))) for way, (_, text) in WAYS.items()]
    counts = [
        ("answers that were not transformers'", str(len(soaked["wrong"]))),
        *((f"left: {name}", f"{value:.0f}") for name, value in soaked["left"].items()),
        ("descriptors before, after", ", ".join(map(str, soaked["descriptors"]))),
        ("MB after each fifth", ", ".join(f"{value:,.1f}" for value in soaked["memory_mb"])),
        ("generated tokens", f"{soaked['generated_tokens']:,.0f}"),
        ("seconds", f"{soaked['seconds']:,.0f}"),
    ]
    return page(
        heading(
            "A server among hostile clients",
            record,
            f": `client_seconds = {CLIENT_SECONDS}`, all other limits as they are.",
            "A tiny Llama with random weights. *Seconds* end when the server holds none of the connections any more. "
            "Memory is that of the server and the processes that read bodies. "
            f"The friend asks for {NUM_TOKENS} tokens, one request after the other, with a key of its own.",
            how="Run",
        ),
        "## Attacks\n\n" + table(columns, attacked),
        f"## Soak\n\n{soaked['requests']:,} clients of one key, {soaked['at_once']} at once.\n\n"
        + table(("clients that", ""), ways)
        + "\n\n"
        + table(("", ""), counts),
    )


def is_wrong(record: Mapping[str, Any]) -> bool:
    """Return whether a friend was answered wrongly, something was left, or memory grew."""
    soaked = record["soak"]
    memory = soaked["memory_mb"]
    return bool(
        any(result["friend"]["wrong"] or not result["has_ended"] for result in record["attacks"].values())
        or soaked["wrong"]
        or any(soaked["left"].values())
        or memory[-1] - memory[len(memory) * 2 // 5] > MOST_GROWTH_MB
    )


@benchmark("hostile", write_report, fails=is_wrong)
@click.option("--requests", default=1500, show_default=True, help="Clients of the soak.")
@click.option("--attack", "names", multiple=True, type=click.Choice([*ATTACKS]), help="Run these attacks only.")
def main(requests: int, names: Sequence[str]) -> dict[str, Any]:
    """Attack a server while a friend asks it, and let clients come and go."""
    attack_names = names or [*ATTACKS]
    results = {}
    with TemporaryDirectory() as folder, progress("attacks", len(attack_names)) as advance:
        root = Path(folder)
        model = save_model(root / "tiny")
        right_answers = answers(model)
        with served(model, root, tables=TABLES, keys=KEYS) as server:
            for name in attack_names:
                results[name] = asyncio.run(suffer(server, ATTACKS[name], right_answers))
                advance(1)
        for name in [name for name in FOR_FEW_FILES if name in attack_names]:
            with served(model, root, tables=TABLES, keys=KEYS, max_files=FEW_FILES) as server:
                results[f"{name}, few files"] = asyncio.run(suffer(server, ATTACKS[name], right_answers))
        with served(model, root, tables=TABLES, keys=KEYS) as server:
            soaked = asyncio.run(soak(server, right_answers, requests))
    return {"attacks": results, "soak": soaked}


if __name__ == "__main__":
    main()
