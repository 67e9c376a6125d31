"""Managers of small pools, and requests that they serve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvframe_testing.audit import audit

from kvframe.cache.manager import KVCacheManager
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import make_plan

PLAN = ("max_model_len", "max_num_batched_tokens", "max_encoder_len")


class HostWithoutBytes:
    """Host memory of some slabs, whose bytes nobody reads."""

    def __init__(self, num_slabs: int) -> None:
        self.num_slabs = num_slabs

    def copy_out(self, *_: object) -> None:
        """Copy nothing."""

    def copy_in(self, *_: object) -> None:
        """Copy nothing."""


def make_manager(*specs: KVCacheSpec, num_slabs: int = 60, max_num_seqs: int = 4, **options: Any) -> KVCacheManager:
    """Return a manager of a pool of so many slabs; the options are those of ``make_plan`` and of the manager."""
    plan = make_plan(*specs, num_slabs=num_slabs, **{name: options.pop(name) for name in PLAN if name in options})
    return KVCacheManager(plan, max_num_seqs=max_num_seqs, **options)


def compute(manager: KVCacheManager, name: str, tokens: Sequence[int], *steps: int, **options: Any) -> int:
    """Start a request and compute it, in one step unless the ends of several are given; return the tokens hit."""
    num_hit = manager.start(name, tokens, **options)
    for num_tokens in steps or (len(tokens),):
        assert manager.extend(name, num_tokens)
        manager.commit(name, tokens, num_tokens)
    audit(manager)
    return num_hit


def serve(manager: KVCacheManager, tokens: Sequence[int], **options: Any) -> int:
    """Compute a request and free it; return the tokens hit."""
    num_hit = compute(manager, "served", tokens, **options)
    manager.free("served")
    return num_hit
