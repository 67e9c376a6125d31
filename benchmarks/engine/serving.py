"""Serve batches with several engines by turns, in processes of their own."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.engine.stepping import Prompts, Served, Setting
from benchmarks.engine.workloads import Workload
from benchmarks.harness import models
from benchmarks.harness.machine import PEER
from benchmarks.harness.process import EngineProcess, start_engines
from benchmarks.harness.record import by_turns
from kvframe.contract.sizes import parse_bytes

KVFRAME, VLLM, TRANSFORMERS, CONTINUOUS = "kvframe", "vLLM", "transformers", "transformers continuous batching"
COMPILED, PACKED, SKIPPING = ", compiled", ", packed", ", prefill skipping"
NGRAM, LOOKUP, DRAFTED, ASSISTED = ", ngram", ", prompt lookup", ", draft model", ", assistant model"
"""Suffixes of a system's name; each switches an option of its engine on."""

Engines = Mapping[str, EngineProcess]


@contextmanager
def start_servers(
    systems: Iterable[str], threads: int, peer: Path = PEER, variables: Mapping[str, str] | None = None
) -> Iterator[dict[str, EngineProcess]]:
    """Start the systems' processes; a system's name is that of an engine, followed by suffixes.

    kvframe with drafts and kvframe without them are engines in one process, so that they share the weights.
    """
    processes = {name: name.removesuffix(NGRAM).removesuffix(DRAFTED) for name in systems}
    modules = {}
    for name in processes.values():
        kind = name.partition(",")[0]
        modules[name] = [f"benchmarks.engine.{'vllm_engine' if kind == VLLM else 'own_engines'}", kind]
    with start_engines(modules, peer, threads=threads, variables=variables) as engines:
        yield {name: engines[process] for name, process in processes.items() if process in engines}


def setting_of(workload: Workload, **options: Any) -> tuple[Setting, dict[str, Any]]:
    """Return the setting with which engines serve a workload, and the configuration of its checkpoint."""
    path = models.path_of(workload.model)
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    memory = parse_bytes(workload.memory)
    return Setting(path=str(path), memory=memory, max_num_seqs=workload.num_prompts, **options), config


def load(engines: Engines, setting: Setting, max_drafts: int = 0, draft_model: str = "") -> None:
    """Let each process load a model instead of its last one, with the options of its systems' suffixes."""
    settings: dict[EngineProcess, dict[str, Any]] = {}
    for name, engine in engines.items():
        ways = {
            "is_compiled": COMPILED in name,
            "is_packed": PACKED in name,
            "is_skipping": SKIPPING in name,
            "max_drafts": max_drafts if name.endswith((NGRAM, LOOKUP, DRAFTED, ASSISTED)) else 0,
            "draft_model": draft_model if name.endswith((DRAFTED, ASSISTED)) else "",
        }
        settings.setdefault(engine, {})[name] = {**dataclasses.asdict(setting), **ways}
    for engine, engine_settings in settings.items():
        engine.ask({"settings": engine_settings})


def serve(engines: Engines, name: str, prompts: Prompts, num_new_tokens: int) -> Served:
    """Let one system serve a batch."""
    served: Served = engines[name].ask({"system": name, "prompts": prompts, "num_new_tokens": num_new_tokens})
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
    results: dict[str, list[Served]] = {name: [] for name in engines}
    own = next(iter(engines))

    def turn(name: str, number: int) -> Served:
        return serve(engines, name, *batch(number))

    for repeat, served in by_turns([*engines], repeats, turn, advance, warm_up=True):
        for name, result in served.items():
            result["equal_prompts"] = fmean(map(list.__eq__, result["tokens"], served[own]["tokens"]))
            if are_equal and result["equal_prompts"] < 1:
                sys.exit(f"{what}: {name} and {own} generate the same for {result['equal_prompts']:.0%} of the prompts")
            if repeat >= 0:
                results[name].append(result)
    return results
