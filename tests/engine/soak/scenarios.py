"""Make the models and prompts of a soak. Caches are so small that requests preempt each other."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from kvframe_transformers.testing import save_tiny

from kvframe import Engine, Prompt, Registry, Setup, Stack, load_plugins
from kvframe.contract.errors import PlanError
from kvframe.contract.model import LoadedModel
from kvframe.planning.groups import Grouping
from kvframe.planning.plan import plan_cache
from kvframe.planning.recognise import find_adapter
from tests.engine.injected_faults import Careless, careless_plugin
from tests.engine.soak.faulty_store import FaultyStore, faulty_store_plugin
from tests.support.overlap import on_queue

VOCABULARY = 128
START = 3
"""The first token of a decoder that has an encoder."""
MARGIN = 1e-3
"""If the two largest logits are nearer to each other, rounding may choose the token; requests end before it."""


@attrs.frozen(kw_only=True)
class Scenario:
    """A model and a small cache.

    Attributes:
        name: The name for ``--scenario`` and the record.
        family: The tiny model's ``model_type`` in transformers.
        what: Its special properties, in words.
        longest: The most tokens of a request.
        longest_output: The most tokens of an output.
        longest_input: The most tokens that the encoder reads; 0 without an encoder.
        cache: The stack's ``[cache]`` without its memory, which is just enough for the longest request.
        limits: The stack's ``[limits]``.
        wrappers: The wrappers of every layer.
        per_second: Requests in a second, outside of bursts.
        has_owners: Whether a request's salt is its owner too.
        overlaps: Whether the next step is chosen while a simulated device computes the last one.
    """

    name: str
    family: str
    what: str
    longest: int
    longest_output: int = 32
    longest_input: int = 0
    cache: Mapping[str, Any] = {"block_size": 4}
    limits: Mapping[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 24}
    wrappers: tuple[str, ...] = ()
    per_second: float = 0.1
    has_owners: bool = False
    overlaps: bool = False


WITH_HOST: dict[str, Any] = {"block_size": 4, "host_memory": "192KiB"}
SCENARIOS = (
    Scenario(
        name="windows",
        family="gemma3_text",
        what="windows of 8 tokens beside full attention, 192 KiB of host memory, a wrapper",
        longest=88,
        cache=WITH_HOST,
        wrappers=(Careless.name,),
    ),
    Scenario(
        name="states",
        family="bamba",
        what="Mamba-2 states beside full attention, steps that overlap",
        longest=72,
        overlaps=True,
    ),
    Scenario(
        name="encoder",
        family="t5gemma",
        what="an encoder and a decoder, both with windows and full attention, 192 KiB of host memory",
        longest=64,
        longest_input=41,
        cache=WITH_HOST,
    ),
    Scenario(
        name="three-blocks",
        family="llama",
        what="a pool of three blocks of four tokens, counted anew after every operation",
        longest=12,
        longest_output=6,
        cache={**WITH_HOST, "host_memory": "16KiB", "audit": True},
        limits={"max_num_seqs": 3, "max_num_batched_tokens": 8},
        per_second=0.2,
    ),
)

STORES: dict[str, Any] = {"block_size": 4, "stores": [FaultyStore.name]}
SCENARIOS_WITH_STORES = (
    Scenario(
        name="full",
        family="llama",
        what="full attention, a store and 48 KiB of host memory",
        longest=72,
        cache={**STORES, "host_memory": "48KiB"},
        has_owners=True,
    ),
    Scenario(
        name="windows",
        family="gemma3_text",
        what="windows of 8 tokens beside full attention, a store, 64 KiB of host memory, steps that overlap",
        longest=88,
        overlaps=True,
        cache={**STORES, **WITH_HOST, "host_memory": "64KiB"},
        wrappers=(Careless.name,),
        has_owners=True,
    ),
    Scenario(
        name="states",
        family="bamba",
        what="Mamba-2 states beside full attention, a store alone",
        longest=72,
        cache=STORES,
        has_owners=True,
    ),
    Scenario(
        name="latents",
        family="deepseek_v3",
        what="latents, a store, 24 KiB of host memory",
        longest=72,
        cache={**STORES, **WITH_HOST, "host_memory": "24KiB"},
        has_owners=True,
    ),
    Scenario(
        name="encoder",
        family="t5gemma",
        what="an encoder and a decoder, both with windows and full attention, a store, 64 KiB of host memory",
        longest=64,
        longest_input=41,
        cache={**STORES, **WITH_HOST, "host_memory": "64KiB"},
        has_owners=True,
    ),
)
"""Scenarios with a faulty page store."""


@attrs.frozen
class CheckedPrompt:
    """A prompt, and its tokens by ``transformers.generate()`` up to the first one that rounding may change."""

    prompt: Any
    num_tokens: int
    expected: tuple[int, ...]


@attrs.frozen
class Served:
    """A scenario's model, ready for engines.

    Attributes:
        scenario: The scenario.
        loaded: The model.
        registry: The registered names for its engine.
        prompts: The prompts of requests: one of a single token, one of the most tokens, and others between.
    """

    scenario: Scenario
    loaded: LoadedModel
    registry: Registry
    prompts: tuple[CheckedPrompt, ...]

    @classmethod
    def of(cls, scenario: Scenario, folder: Path, num_prompts: int) -> Served:
        """Make the model in a folder, and let transformers generate the expected tokens of every prompt."""
        path = folder / scenario.name
        save_tiny(path, scenario.family)
        registry = load_plugins(plugins=[careless_plugin(), faulty_store_plugin()]).registry
        loaded = find_adapter(path, registry).load(path, device="cpu", dtype="float32")
        checked = [_expected(loaded, prompt, scenario) for prompt in _prompts(scenario, num_prompts)]
        return cls(scenario, loaded, registry, tuple(each for each in checked if each.expected))

    def engine(self) -> Engine:
        """Return an engine whose memory is just enough for the longest request."""
        rules = [{"layers": "*", "wrappers": list(self.scenario.wrappers)}] if self.scenario.wrappers else []
        tables: dict[str, Any] = {
            "cache": {"memory": "4MiB", **self.scenario.cache},
            "limits": {"max_model_len": self.scenario.longest, **self.scenario.limits},
            "engine": {"self_check": False, "overlap": "on" if self.scenario.overlaps else "off"},
            "rules": rules,
        }
        tables["cache"] = {**self.scenario.cache, "memory": self._tight_memory(self._set_up(tables).grouping)}
        engine = Engine(self.loaded, self._set_up(tables), poison_freed=True)
        if self.scenario.overlaps:
            on_queue(engine, 0.0005)
        return engine

    def _set_up(self, tables: dict[str, Any]) -> Setup:
        return Setup.of(self.loaded.description, Stack.from_mapping(tables), self.registry, dtype="float32")

    def _tight_memory(self, grouping: Grouping) -> int:
        lens = self.loaded.description.max_input_lens
        for num_bytes in range(1024, 1 << 22, 1024):
            try:
                plan = plan_cache(
                    grouping,
                    memory_bytes=num_bytes,
                    max_model_len=self.scenario.longest,
                    max_num_batched_tokens=self.scenario.limits["max_num_batched_tokens"],
                    max_input_lens=lens,
                )
            except PlanError:
                continue
            if plan.fits(self.scenario.longest, dict.fromkeys(lens, self.scenario.longest_input)):
                return num_bytes
        raise AssertionError("no memory is enough")


def _prompts(scenario: Scenario, count: int) -> list[Any]:
    """Return prompts. Most of them share their beginning, or the encoder's input, with others."""
    source = random.Random(f"{scenario.name}-prompts")

    def draw(num_tokens: int) -> list[int]:
        return [source.randrange(4, VOCABULARY) for _ in range(num_tokens)]

    beginnings = [[], draw(scenario.longest // 12), draw(scenario.longest // 4), draw(scenario.longest // 2)]
    encoded = [draw(length) for length in (1, 6, 17, scenario.longest_input)] if scenario.longest_input else []
    prompts: list[Any] = []
    for number in range(count):
        most = scenario.longest - 1 if number == 1 else scenario.longest - scenario.longest_output // 2
        if number < 2:
            tokens = draw((1, most)[number])
        else:
            # Most are short: many requests start, all of them grow, and one has to be preempted.
            beginning = source.choice(beginnings)
            room = most - len(beginning) if source.random() < 0.3 else scenario.longest // 6
            tokens = beginning + draw(source.randint(1, max(1, min(room, most - len(beginning)))))
        if encoded:
            tokens[0] = START
            prompts.append(Prompt(encoder=source.choice(encoded), decoder=tokens))
        else:
            prompts.append(tokens)
    return prompts


def _expected(loaded: LoadedModel, prompt: Any, scenario: Scenario) -> CheckedPrompt:
    model: Any = loaded
    tokens: Any = prompt.decoder if isinstance(prompt, Prompt) else prompt
    num_new = min(scenario.longest_output, scenario.longest - len(tokens))
    options = {"max_new_tokens": num_new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        if isinstance(prompt, Prompt):
            read = torch.tensor([prompt.encoder])
            made = model.model.generate(read, decoder_input_ids=torch.tensor([tokens]), **options)
        else:
            made = model.model.generate(torch.tensor([tokens]), **options)
    best = torch.stack([logits[0].topk(2).values for logits in made.logits])
    is_sure = best[:, 0] - best[:, 1] > MARGIN
    num_sure = len(is_sure) if bool(is_sure.all()) else int((~is_sure).nonzero()[0])
    return CheckedPrompt(prompt, len(tokens), tuple(made.sequences[0, -num_new:].tolist()[:num_sure]))
