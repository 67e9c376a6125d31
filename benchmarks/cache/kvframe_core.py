"""kvframe's cache core, its ``KVCacheManager`` called as the engine calls it."""

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

from benchmarks.cache.setting import BLOCK_SIZE, Setting
from benchmarks.cache.work import Mistake, TokenIds
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import AttentionSpec, KVCacheSpec, LayerSpec, TokenRange
from kvframe.planning.groups import group_layers
from kvframe.planning.plan import KVCachePlan, plan_cache

SIZES: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": "float32"}
PAGE_BYTES = FullAttentionSpec(**SIZES).block_bytes
STATE = 2
"""Of the past, a state needs the last token: it is held as by a window of two."""


@attrs.frozen(kw_only=True)
class LiveRangeSpec(AttentionSpec):
    """A window that only its live ranges say: it has no mask, and every derivation is the base class's."""

    kind = "live_range"
    window: int

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        """Return the last tokens of the window."""
        return ((max(0, n - self.window + 1), n),) if n else ()


@attrs.frozen(eq=False)
class Prompt:
    """A request.

    Attributes:
        name: Its id.
        token_ids: Its tokens, which the manager reads; a step appends to them.
    """

    name: str
    token_ids: MutableSequence[int]


class KVFrame:
    """The manager, with the groups that kvframe plans. Its verbs are those of every core that is measured.

    A *prompt* is what a core takes for a request.

    Attributes:
        release_lag: Tokens by which a core releases later what a window has passed.
    """

    release_lag = 0

    def __init__(self) -> None:
        """Start with no manager."""
        self._names = count()

    def describe(self) -> dict[str, str]:
        """Return the version of kvframe."""
        return {"kvframe": version("kvframe")}

    def build(self, setting: Setting) -> None:
        """Make the manager; what an earlier one holds is given up."""
        self._running: set[str] = set()
        self.step: Callable[[TokenIds], None] = self._step_each if setting.one_by_one else self._step_together
        self._manager = KVCacheManager(
            plan_of(setting), max_num_seqs=setting.max_num_seqs, prefix_caching=setting.caching
        )

    def receive(self, token_ids: MutableSequence[int]) -> Prompt:
        """Return a prompt."""
        return Prompt(str(next(self._names)), token_ids)

    def make_keys(self, prompt: Prompt) -> Any:
        """Return what a lookup needs of a prompt: its token ids as an array."""
        return array("I", prompt.token_ids)

    def prepare(self, token_ids: TokenIds) -> Prompt:
        """Return a prompt whose token ids are an array."""
        return self.receive(array("I", token_ids))

    def look_up(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt that need not be computed."""
        return self._manager.find(prompt.token_ids)

    def begin(self, prompt: Prompt) -> int:
        """Look a prompt up and take its cached blocks; return what was cached."""
        self._running.add(prompt.name)
        return self._manager.start(prompt.name, prompt.token_ids)

    def advance(self, prompts: Sequence[Prompt], num_tokens: int) -> None:
        """Do a step in which each prompt that has begun is computed as far as ``num_tokens``."""
        manager = self._manager
        rows = np.array([manager.row(prompt.name) for prompt in prompts])
        ends = np.full(len(prompts), num_tokens)
        if not manager.extend_rows(rows, ends):
            raise Mistake("kvframe has no room")
        manager.commit_rows(rows, ends)

    def compute(self, prompt: Prompt, chunk: int) -> int:
        """Look a prompt up and compute the rest, ``chunk`` tokens in a step; return what was cached."""
        hit = self.begin(prompt)
        for start in range(hit, len(prompt.token_ids), chunk):
            stop = min(start + chunk, len(prompt.token_ids))
            if not self._manager.extend(prompt.name, stop):
                raise Mistake("kvframe has no room")
            self._manager.commit(prompt.name, prompt.token_ids, stop)
        return hit

    def pass_through(self, prompt: Prompt) -> None:
        """Look a prompt up, compute the rest in one step, and let the request go."""
        manager, name, tokens = self._manager, prompt.name, prompt.token_ids
        manager.start(name, tokens)
        if not manager.extend(name, len(tokens)):
            raise Mistake("kvframe has no room")
        manager.commit(name, tokens, len(tokens))
        manager.free(name)

    def let_go(self, prompt: Prompt) -> None:
        """End a request and release what it holds; a lookup holds nothing."""
        if prompt.name in self._running:
            self._running.remove(prompt.name)
            self._manager.free(prompt.name)

    def generate_from(self, prompts: Sequence[Prompt]) -> None:
        """Choose the requests of the decode steps, which ``step`` does; all their tokens are computed."""
        self._prompts = prompts
        self._rows = np.array([self._manager.row(prompt.name) for prompt in prompts])
        self._num_tokens = np.array([len(prompt.token_ids) for prompt in prompts])

    def _step_together(self, token_ids: TokenIds) -> None:
        """Do a decode step by the verbs for all requests of a step."""
        self._num_tokens += 1
        if not self._manager.extend_rows(self._rows, self._num_tokens):
            raise Mistake("kvframe has no room")
        for prompt, token in zip(self._prompts, token_ids, strict=True):
            prompt.token_ids.append(token)
        self._manager.commit_rows(self._rows, self._num_tokens)

    def _step_each(self, token_ids: TokenIds) -> None:
        """Do a decode step by the verbs for one request."""
        extend, commit = self._manager.extend, self._manager.commit
        for prompt, token in zip(self._prompts, token_ids, strict=True):
            whole = prompt.token_ids
            num_tokens = len(whole) + 1
            if not extend(prompt.name, num_tokens):
                raise Mistake("kvframe has no room")
            whole.append(token)
            commit(prompt.name, whole, num_tokens)

    def held(self, prompt: Prompt) -> list[tuple[int | None, list[int]]]:
        """Return each group's window, and the request's block ids in it, 0 where a block is not held."""
        windows = [
            STATE if group.spec.kind == MambaSpec.kind else getattr(group.spec, "window", None)
            for group in self._manager.plan.groups
        ]
        return list(zip(windows, self._manager.block_ids(prompt.name), strict=True))

    def num_held(self) -> int:
        """Return the blocks that requests hold."""
        return self._manager.num_held_pages

    def cached_states(self) -> list[int]:
        """Return the page of each cached block that holds a recurrent state."""
        groups = self._manager.plan.groups
        return [page for group, page in self._manager.published() if groups[group].spec.kind == MambaSpec.kind]

    def lose(self, blocks: Sequence[int]) -> None:
        """Give up cached blocks; some of them may have gone with others."""
        pool = self._manager._pool
        for page in blocks:
            block_ids = np.array([page], dtype=np.int32)
            if pool.is_cached(block_ids)[0]:
                pool.evict_blocks(block_ids)


@cache
def plan_of(setting: Setting) -> KVCachePlan:
    """Return the plan of a model with these layers; planning also checks each spec's answers, once."""
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
