"""Serve batches with several engines by turns, each engine in a process of its own."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine.stepping import Prompts, Served, Setting
from benchmarks.engine.workloads import Workload
from benchmarks.harness import models
from benchmarks.harness.machine import PEER
from benchmarks.harness.process import EngineProcess, start_engines
from benchmarks.harness.record import by_turns
from kvframe.loading.checks import parse_bytes

KVFRAME, VLLM, TRANSFORMERS, CONTINUOUS = "kvframe", "vLLM", "transformers", "transformers continuous batching"
COMPILED, PACKED, SKIPPING = ", compiled", ", packed", ", prefill skipping"
NGRAM, LOOKUP, DRAFTED, ASSISTED = ", ngram", ", prompt lookup", ", draft model", ", assistant model"
"""Suffixes of a system's name; each switches an option of its engine on."""

Engines = Mapping[str, EngineProcess]


def start_servers(
    systems: Iterable[str], threads: int, peer: Path = PEER, variables: Mapping[str, str] | None = None
) -> AbstractContextManager[dict[str, EngineProcess]]:
    """Start a process for each system; its name is that of an engine, followed by suffixes."""
    modules = {}
    for name in dict.fromkeys(systems):
        kind = name.partition(",")[0]
        modules[name] = [f"benchmarks.engine.{'vllm_engine' if kind == VLLM else 'own_engines'}", kind]
    return start_engines(modules, peer, threads=threads, variables=variables)


def setting_of(workload: Workload, **options: Any) -> tuple[Setting, dict[str, Any]]:
    """Return the setting with which engines serve a workload, and the configuration of its checkpoint."""
    path = models.path_of(workload.model)
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    memory = parse_bytes(workload.memory)
    return Setting(path=str(path), memory=memory, max_num_seqs=workload.num_prompts, **options), config


def load(engines: Engines, setting: Setting, max_drafts: int = 0, draft_model: str = "") -> None:
    """Let each engine load a model instead of its last one, with the options of its name's suffixes."""
    for name, engine in engines.items():
        ways = {
            "is_compiled": COMPILED in name,
            "is_packed": PACKED in name,
            "is_skipping": SKIPPING in name,
            "max_drafts": max_drafts if name.endswith((NGRAM, LOOKUP, DRAFTED, ASSISTED)) else 0,
            "draft_model": draft_model if name.endswith((DRAFTED, ASSISTED)) else "",
        }
        engine.ask({"setting": {**dataclasses.asdict(setting), **ways}})


def serve(engine: EngineProcess, prompts: Prompts, num_new_tokens: int) -> Served:
    """Let one engine serve a batch."""
    served: Served = engine.ask({"prompts": prompts, "num_new_tokens": num_new_tokens})
    return served


def serve_by_turns(
    what: str,
    engines: Engines,
    repeats: int,
    batch: Callable[[int], tuple[Prompts, int]],
    advance: Callable[[int], object],
    *,
    are_equal: bool = True,
) -> dict[str, list[Served]]:
    """Return the results of each engine in each round, without those of a first round (-1) that warms up.

    ``batch`` returns the prompts of a round, and the number of new tokens of each.

    Raises:
        SystemExit: Two engines generated different tokens, though all must be equal.
    """
    found: dict[str, list[Served]] = {name: [] for name in engines}
    own = next(iter(engines))

    def turn(name: str, number: int) -> Served:
        return serve(engines[name], *batch(number))

    for repeat, served in by_turns([*engines], repeats, turn, advance, warm_up=True):
        for name, each in served.items():
            each["equal_prompts"] = fmean(map(list.__eq__, each["tokens"], served[own]["tokens"]))
            if are_equal and each["equal_prompts"] < 1:
                sys.exit(f"{what}: {name} and {own} generate the same for {each['equal_prompts']:.0%} of the prompts")
            if repeat >= 0:
                found[name].append(each)
    return found
