"""Describe the caches that traffic runs on: published models, their memory, and its layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from benchmarks.memory.padded_groups import PaddedGroups
from benchmarks.memory.plans import DTYPE, LAYER_FILES, MAX_MODEL_LEN, STATES_ONCE, held_bytes
from kvframe.config.stack import Stack
from kvframe.contract.description import ModelDescription
from kvframe.contract.specs import LayerSpec, align_up
from kvframe.loading.plugins import load_plugins
from kvframe.planning.groups import Grouping, group_layers, make_layer_specs
from kvframe.planning.layer_file import read_layer_file
from kvframe.planning.plan import KVCachePlan, plan_cache

REQUEST_TOKENS = 8_192
"""The memory of a model is given in requests of so many tokens, or as many as the model takes."""

PAGES_PER_REQUEST = 8
"""The memory has at least so many of the largest pages for each of these requests, because states are large."""

TOKENS_A_STEP = 2_048
MAX_NUM_SEQS = 1_024

STATE_BLOCK = 64
"""Tokens between two states that are kept for prefix caching, in kvframe's layout with few states."""

FEWER = {"rules": [{"kind": "mamba", "spec": {"block_size": STATE_BLOCK}, "optional": True}]}
KVFRAME, FEW_STATES, PADDED = "kvframe", "kvframe, few states", "equal padded groups"


@attrs.frozen(kw_only=True)
class Shape:
    """A model's layers, and the memory that all its layouts get.

    Attributes:
        description: The model.
        longest: The most tokens of a request: as many as the model takes, but at least four such requests fit.
        memory_bytes: The memory's bytes.
        keeps_states: Whether some of the layers keep states.
    """

    description: ModelDescription
    longest: int
    memory_bytes: int
    keeps_states: bool

    @classmethod
    def read(cls, file: str, num_requests: int) -> Shape:
        """Read a model's layers.

        Args:
            file: The layer file.
            num_requests: The memory holds so many requests of ``REQUEST_TOKENS`` tokens if every layer keeps every
                token and one state.
        """
        description = read_layer_file(LAYER_FILES / file)
        longest = min(MAX_MODEL_LEN, description.max_model_len)
        full = _plan(group_layers(_layers(description, STATES_ONCE), hybrid=False), description, longest, 1 << 42)
        request_bytes = held_bytes(full, min(REQUEST_TOKENS, longest))
        largest = max(group.page_bytes for group in full.groups)
        return cls(
            description=description,
            longest=min(longest, num_requests * REQUEST_TOKENS // 4),
            memory_bytes=align_up(num_requests * max(request_bytes, PAGES_PER_REQUEST * largest), 1 << 20),
            keeps_states=any(group.spec.is_per_block for group in full.groups),
        )

    def plan(self, layout: str = KVFRAME) -> KVCachePlan:
        """Return the plan of the memory in a layout."""
        if layout == PADDED:
            groups = PaddedGroups.of(_layers(self.description, {}), has_longer_states=True)
            return groups.plan(self.memory_bytes, self.longest, TOKENS_A_STEP, self.description.max_input_lens)
        rules = FEWER if layout == FEW_STATES else {}
        return _plan(group_layers(_layers(self.description, rules)), self.description, self.longest, self.memory_bytes)

    def live_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the pages that the next token of a request with ``num_tokens`` tokens reads."""
        total = 0
        for group in self.plan().groups:
            length = self.description.max_input_lens.get(group.spec.sequence, num_tokens)
            total += group.page_bytes * sum(stop - start for start, stop in group.spec.live_blocks(length))
        return total


def _layers(description: ModelDescription, rules: dict[str, Any]) -> Sequence[LayerSpec]:
    stack = Stack.from_mapping({"engine": {"dtype": DTYPE}, **rules})
    return make_layer_specs(description, load_plugins().registry, stack, DTYPE)


def _plan(grouping: Grouping, description: ModelDescription, longest: int, memory_bytes: int) -> KVCachePlan:
    return plan_cache(
        grouping,
        memory_bytes=memory_bytes,
        max_model_len=longest,
        max_num_batched_tokens=TOKENS_A_STEP,
        max_input_lens=description.max_input_lens,
    )
