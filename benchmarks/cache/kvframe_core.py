"""kvframe's cache core: its ``KVCacheManager``, called as the engine calls it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, MutableSequence, Sequence
from functools import cache
from importlib.metadata import version
from itertools import count
from typing import Any

import attrs
import numpy as np
from kvframe_mamba.spec import MambaSpec
from kvframe_sliding_window.spec import SlidingWindowSpec
from kvframe_testing.audit import findable_pages

from benchmarks.cache.setting import BLOCK_SIZE, STATE, Mistake, Setting, TokenIds
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import AttentionSpec, KVCacheSpec, LayerSpec, TokenRange
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache

SIZES: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": "float32"}
PAGE_BYTES = FullAttentionSpec(**SIZES).block_bytes


@attrs.frozen(kw_only=True)
class LiveRangeSpec(AttentionSpec):
    """A window without a mask: only its live ranges describe it, and every derivation is the base class's."""

    kind = "live_range"
    window: int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the last tokens, as many as the window has."""
        return ((max(0, n - self.window + 1), n),) if n else ()


@attrs.frozen(eq=False)
class Prompt:
    """A request. The manager reads its tokens, and a step appends to them."""

    name: str
    token_ids: MutableSequence[int]


class KVFrame:
    """The manager, with the groups that kvframe plans. Every measured core has the methods of this class."""

    release_lag = 0
    """The number of tokens by which a core releases a block later than its window has passed it."""

    def __init__(self) -> None:
        """Start without a manager."""
        self._names = count()

    def describe(self) -> dict[str, str]:
        """Return the version of kvframe."""
        return {"kvframe": version("kvframe")}

    def build(self, setting: Setting) -> None:
        """Make a new manager instead of the last one."""
        self._running: set[str] = set()
        self.step: Callable[[TokenIds], None] = self._step_each if setting.one_by_one else self._step_together
        self._manager = KVCacheManager(
            plan_of(setting), max_num_seqs=setting.max_num_seqs, prefix_caching=setting.caching
        )

    def receive(self, token_ids: MutableSequence[int]) -> Prompt:
        """Return the request of a prompt."""
        return Prompt(str(next(self._names)), token_ids)

    def make_keys(self, prompt: Prompt) -> Any:
        """Return the keys that a lookup needs: the prompt's token ids as an array."""
        return array("I", prompt.token_ids)

    def prepare(self, token_ids: TokenIds) -> Prompt:
        """Return the request of a prompt, with the keys that a lookup needs."""
        return self.receive(array("I", token_ids))

    def look_up(self, prompt: Prompt) -> int:
        """Return how many of a prompt's tokens are cached."""
        return self._manager.find(prompt.token_ids)

    def begin(self, prompt: Prompt) -> int:
        """Begin a request with its cached blocks; return how many of its tokens are cached."""
        self._running.add(prompt.name)
        return self._manager.start(prompt.name, prompt.token_ids)

    def advance(self, prompts: Sequence[Prompt], num_tokens: int) -> None:
        """Run a step that computes each of these requests up to its token ``num_tokens``."""
        manager = self._manager
        rows = np.array([manager.row(prompt.name) for prompt in prompts])
        ends = np.full(len(prompts), num_tokens)
        if not manager.extend_rows(rows, ends):
            raise Mistake("kvframe has no room")
        manager.commit_rows(rows, ends)

    def compute(self, prompt: Prompt, chunk: int) -> int:
        """Begin a request and compute the rest, ``chunk`` tokens in a step; return how many tokens were cached."""
        hit = self.begin(prompt)
        for start in range(hit, len(prompt.token_ids), chunk):
            self.advance([prompt], min(start + chunk, len(prompt.token_ids)))
        return hit

    def pass_through(self, prompt: Prompt) -> None:
        """Begin a request, compute it in one step, and end it."""
        manager, name, tokens = self._manager, prompt.name, prompt.token_ids
        manager.start(name, tokens)
        if not manager.extend(name, len(tokens)):
            raise Mistake("kvframe has no room")
        manager.commit(name, tokens, len(tokens))
        manager.free(name)

    def let_go(self, prompt: Prompt) -> None:
        """End a request and release its blocks. A request that was only looked up holds none."""
        if prompt.name in self._running:
            self._running.remove(prompt.name)
            self._manager.free(prompt.name)

    def generate_from(self, prompts: Sequence[Prompt]) -> None:
        """Choose the requests that ``step`` decodes; all their tokens are computed."""
        self._prompts = prompts
        self._rows = np.array([self._manager.row(prompt.name) for prompt in prompts])
        self._num_tokens = np.array([len(prompt.token_ids) for prompt in prompts])

    def _step_together(self, token_ids: TokenIds) -> None:
        """Decode a token of each request by the manager's methods for batches."""
        self._num_tokens += 1
        if not self._manager.extend_rows(self._rows, self._num_tokens):
            raise Mistake("kvframe has no room")
        for prompt, token in zip(self._prompts, token_ids, strict=True):
            prompt.token_ids.append(token)
        self._manager.commit_rows(self._rows, self._num_tokens)

    def _step_each(self, token_ids: TokenIds) -> None:
        """Decode a token of each request by the manager's methods for one request."""
        extend, commit = self._manager.extend, self._manager.commit
        for prompt, token in zip(self._prompts, token_ids, strict=True):
            prompt_ids = prompt.token_ids
            num_tokens = len(prompt_ids) + 1
            if not extend(prompt.name, num_tokens):
                raise Mistake("kvframe has no room")
            prompt_ids.append(token)
            commit(prompt.name, prompt_ids, num_tokens)

    def record_events(self) -> Callable[[], Sequence[Any]]:
        """Record events from now on; return the function that takes those since its last call."""
        return self._manager.record_events(bytes(32)).take

    def held(self, prompt: Prompt) -> list[tuple[int | None, list[int]]]:
        """Return each group's window, and the request's block ids in the group; 0 if a block is not held."""
        windows = [
            STATE if group.spec.kind == MambaSpec.kind else getattr(group.spec, "window", None)
            for group in self._manager.plan.groups
        ]
        return list(zip(windows, self._manager.block_ids(prompt.name), strict=True))

    def num_held(self) -> int:
        """Return the number of blocks that requests hold."""
        return self._manager.num_held_pages

    def cached_states(self) -> list[int]:
        """Return the page of each cached block that holds a recurrent state."""
        groups = self._manager.plan.groups
        return [page for group, page in findable_pages(self._manager) if groups[group].spec.kind == MambaSpec.kind]

    def lose(self, blocks: Sequence[int]) -> None:
        """Evict cached blocks; evicting one may also evict others."""
        pool = self._manager._pool
        for page in blocks:
            block_ids = np.array([page], dtype=np.int32)
            if pool.is_cached(block_ids)[0]:
                pool.evict_blocks(block_ids)


@cache
def plan_of(setting: Setting) -> KVCachePlan:
    """Return the plan of a model with these layers."""
    of_window = SlidingWindowSpec if setting.has_masks else LiveRangeSpec
    specs: list[KVCacheSpec] = [
        FullAttentionSpec(**SIZES) if window is None else of_window(window=window, **SIZES)
        for window in setting.windows
    ]
    state = MambaSpec(block_size=BLOCK_SIZE, recurrent_shapes=((PAGE_BYTES // 4,),))
    specs += [state] * setting.num_states
    layers = [LayerSpec(name=f"layer{index}", spec=spec) for index, spec in enumerate(specs)]
    return plan_cache(
        group_layers(layers),
        memory_bytes=setting.num_blocks * PAGE_BYTES,
        max_model_len=setting.max_model_len,
        max_num_batched_tokens=min(2048, setting.max_model_len),
    )
