"""Random requests agree with the cache manager, and find each of the faults that a manager or a policy can have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import pytest
from kvframe_testing.laws import ConformanceError
from kvframe_testing.requests import PageContents, check_manager

from kvframe import KVCacheManager, KVCachePlan
from kvframe.contract.eviction import EvictionPolicy
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import full, make_plan, masked, ranged, state

VERBS = {"start", "extend", "commit", "fork", "free", "reset"}
MIXTURES: tuple[tuple[KVCacheSpec, ...], ...] = (
    (full(2), ranged(window=5)),
    (state(every=2), full(2), masked(chunk=6)),
    (state(2, every=1, num_rollback=2), masked(window=3, num_sink_tokens=2)),
)


def make(plan: KVCachePlan, contents: PageContents, **options: Any) -> KVCacheManager:
    return KVCacheManager(plan, max_num_seqs=4, copier=contents.copy_within, **options)


@pytest.mark.parametrize("specs", MIXTURES)
@pytest.mark.parametrize("num_slabs", [20, 80])
def test_the_manager_is_a_cache(specs: Sequence[KVCacheSpec], num_slabs: int) -> None:
    assert VERBS == check_manager(make, make_plan(*specs, num_slabs=num_slabs)).keys()


@attrs.frozen(kw_only=True)
class NewestFirst(EvictionPolicy):
    name = "newest_first"

    def priorities(self, pages: Any) -> Any:
        return np.full(len(pages.uses), -pages.clock)


def test_the_manager_is_a_cache_with_another_eviction_policy() -> None:
    plan = make_plan(full(2), ranged(window=5), num_slabs=20)
    check_manager(lambda plan, contents: make(plan, contents, eviction=NewestFirst()), plan)


class FindsNothing(KVCacheManager):
    def start(self, *arguments: Any, **options: Any) -> int:
        return super().start(*arguments, **options | {"use_prefix": False})


class FindsThePrompt(KVCacheManager):
    def start(self, request_id: str, token_ids: Sequence[int], **options: Any) -> int:
        hit = super().start(request_id, token_ids, **options)
        return len(token_ids) if hit else 0


class IgnoresSalts(KVCacheManager):
    def start(self, *arguments: Any, **options: Any) -> int:
        return super().start(*arguments, **options | {"salt": ""})


class IgnoresResets(KVCacheManager):
    def reset_prefix_cache(self) -> None:
        pass


class ExtendsWhatItRefuses(KVCacheManager):
    num_calls = 0

    def extend(self, request_id: str, num_tokens: int) -> bool:
        self.num_calls += 1
        return super().extend(request_id, num_tokens) and self.num_calls % 50 != 0


class AllocatesNothing(KVCacheManager):
    def extend(self, request_id: str, num_tokens: int) -> bool:
        return True


class SharesPages(KVCacheManager):
    def block_ids(self, request_id: str) -> list[list[int]]:
        return super().block_ids(next(iter(self._entries)))


class KeepsPages(KVCacheManager):
    def free(self, request_id: str) -> None:
        if request_id != "again":
            super().fork(request_id, f"kept {request_id}", self._entries[request_id].token_ids)
        super().free(request_id)


class CopiesNothing(PageContents):
    def copy_within(self, *arguments: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("manager", "law"),
    [
        (FindsNothing, "finding"),
        (FindsThePrompt, "finding"),
        (IgnoresSalts, "the state after"),
        (IgnoresResets, "the state after"),
        (ExtendsWhatItRefuses, "refusing"),
        (AllocatesNothing, "has no page"),
        (SharesPages, "the state after|writing|forgetting|has no page"),
        (KeepsPages, "ending|RequestError"),
    ],
)
def test_a_manager_with_a_fault_is_found(manager: type[KVCacheManager], law: str) -> None:
    def make(plan: KVCachePlan, contents: PageContents) -> KVCacheManager:
        return manager(plan, max_num_seqs=400, copier=contents.copy_within)

    with pytest.raises(ConformanceError, match=rf"^seed 3, event \d+: .*({law})"):
        check_manager(make, make_plan(full(2), ranged(window=5), num_slabs=80), seed=3)


def test_bytes_that_are_not_copied_are_found() -> None:
    def make(plan: KVCachePlan, contents: PageContents) -> KVCacheManager:
        copies = CopiesNothing(plan)
        copies.pages = contents.pages
        return KVCacheManager(plan, max_num_seqs=4, copier=copies.copy_within)

    with pytest.raises(ConformanceError, match="the state after"):
        check_manager(make, make_plan(full(4), num_slabs=40))


@pytest.mark.parametrize("own", [ranged(window=3), full()])
def test_a_manager_that_forgets_too_early_or_too_late_is_found(own: KVCacheSpec) -> None:
    def make_for_another_type(plan: KVCachePlan, contents: PageContents) -> KVCacheManager:
        (group,) = plan.groups
        return make(attrs.evolve(plan, groups=(attrs.evolve(group, spec=own),)), contents)

    with pytest.raises(ConformanceError, match="forgetting"):
        check_manager(make_for_another_type, make_plan(ranged(window=9), num_slabs=40))


class OnlyItsVerbs:
    """A host's manager with the four verbs of a request only."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.start, self.extend, self.commit = manager.start, manager.extend, manager.commit
        self.free, self.block_ids = manager.free, manager.block_ids
        self._manager = manager

    @property
    def num_held_pages(self) -> int:
        return self._manager.num_held_pages


def test_a_host_needs_four_verbs() -> None:
    def make_host(plan: KVCachePlan, contents: PageContents) -> Any:
        return OnlyItsVerbs(make(plan, contents))

    assert VERBS - {"fork", "reset"} == check_manager(make_host, make_plan(full())).keys()
