"""Batches that several engines serve by turns, each engine in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine.stepping import Served, Setting
from benchmarks.harness.machine import PEER
from benchmarks.harness.process import EngineProcess, start_engines
from benchmarks.harness.record import by_turns

KVFRAME, VLLM, TRANSFORMERS, CONTINUOUS = "kvframe", "vLLM", "transformers", "transformers continuous batching"
COMPILED, PACKED, NGRAM, LOOKUP = ", compiled", ", packed", ", ngram", ", prompt lookup"
"""Ends of a system's name: in which way it serves."""

Engines = Mapping[str, EngineProcess]
Asked = dict[str, Any]
"""A batch: its ``prompts``, and ``num_new_tokens``."""


def start_servers(
    systems: Iterable[str], threads: int, peer: Path = PEER, variables: Mapping[str, str] | None = None
) -> AbstractContextManager[dict[str, EngineProcess]]:
    """Start a process for each system, which is named by its engine and a way of serving."""
    modules = {}
    for name in dict.fromkeys(systems):
        kind = name.partition(",")[0]
        modules[name] = [f"benchmarks.engine.{'vllm_engine' if kind == VLLM else 'own_engines'}", kind]
    return start_engines(modules, peer, threads=threads, variables=variables)


def load(engines: Engines, setting: Setting, max_drafts: int = 0) -> None:
    """Let each engine load a model in its way, instead of the one before."""
    for name, engine in engines.items():
        ways = {
            "is_compiled": COMPILED in name,
            "is_packed": PACKED in name,
            "max_drafts": max_drafts if name.endswith((NGRAM, LOOKUP)) else 0,
        }
        engine.ask({"setting": {**dataclasses.asdict(setting), **ways}})


def serve_by_turns(
    what: str,
    engines: Engines,
    repeats: int,
    ask: Callable[[int], Asked],
    advance: Callable[[int], object],
    *,
    are_equal: bool = True,
) -> dict[str, list[Served]]:
    """Return what each engine served in each round.

    Args:
        what: The batch, in messages.
        engines: With a model loaded.
        repeats: The rounds that count, after one that warms up.
        ask: Returns the batch of a round.
        advance: Called with 1 after each round.
        are_equal: Whether all have to generate the same tokens.

    Raises:
        SystemExit: Two engines generated different tokens, and have to be equal.
    """
    found: dict[str, list[Served]] = {name: [] for name in engines}
    own = next(iter(engines))
    for repeat, served in by_turns(
        [*engines], repeats, lambda name, number: engines[name].ask(ask(number)), advance, warm_up=True
    ):
        for name, each in served.items():
            each["equal_prompts"] = fmean(map(list.__eq__, each["tokens"], served[own]["tokens"]))
            if are_equal and each["equal_prompts"] < 1:
                sys.exit(f"{what}: {name} and {own} generate the same for {each['equal_prompts']:.0%} of the prompts")
            if repeat >= 0:
                found[name].append(each)
    return found


def config_of(path: Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint."""
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config
