"""The audit finds a cache that is broken, and in debug mode names the verb that broke it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvframe_testing.audit import READERS, audit, audit_each_verb

from kvframe.cache.block_pool import BlockPool
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import StackError
from kvframe.contract.specs import KVCacheSpec
from tests.cache.plans import full, make_plan, masked
from tests.models.serving import TinyModel, ids
from tests.support.engines import manager_of, pool_of

ONE_SIZE, TWO_SIZES = (full(),), (full(), masked(2, window=5))


def make_manager(*specs: KVCacheSpec) -> KVCacheManager:
    """Return a manager in which one request holds pages, and a freed one left cached pages."""
    manager = KVCacheManager(make_plan(*specs, num_slabs=30), max_num_seqs=2)
    for name in ("gone", "here"):
        tokens = [*ids(3, 9), len(name)]
        manager.start(name, tokens, salt=name)
        assert manager.extend(name, len(tokens))
        manager.commit(name, tokens, len(tokens))
    manager.free("gone")
    return manager


def held(manager: KVCacheManager) -> Any:
    return manager.tables[0].ids[manager.row("here"), :1]


def cached(pool: BlockPool) -> Any:
    pages = pool.free_list.all_blocks()
    return pages[pool.is_cached(pages)][:1]


def lose_a_free_page(manager: KVCacheManager) -> None:
    pool_of(manager).free_list._num_free -= 1


def list_a_free_page_twice(manager: KVCacheManager) -> None:
    pool_of(manager).free_list.move_blocks(pool_of(manager).free_list.free_blocks()[:1], 0, -1, 0)


def give_a_held_page(manager: KVCacheManager) -> None:
    pool_of(manager).free_list.move_blocks(held(manager), 0, -1, 0)


def give_a_cached_page(manager: KVCacheManager) -> None:
    pool_of(manager).free_list.move_blocks(cached(pool_of(manager)), 0, -1, 0)


def cache_a_held_page(manager: KVCacheManager) -> None:
    pool_of(manager)._state[pool_of(manager)._pool_indices(held(manager))] = 1


def hold_once_too_often(manager: KVCacheManager) -> None:
    pool_of(manager)._state[pool_of(manager)._pool_indices(held(manager))] -= 1


def forget_an_owner(manager: KVCacheManager) -> None:
    pool_of(manager)._owner[:] = 0


def own_a_free_page(manager: KVCacheManager) -> None:
    pool_of(manager).publish_blocks(1, pool_of(manager).free_list.free_blocks()[:1], np.zeros(1, dtype=np.int32))


def miscount_the_cached(manager: KVCacheManager) -> None:
    pool_of(manager).num_cached += 1


def miscount_the_held(manager: KVCacheManager) -> None:
    pool_of(manager).blocks_held[0] -= 1


def miscount_bytes(manager: KVCacheManager) -> None:
    pool_of(manager).held_bytes -= 1


def lose_a_row(manager: KVCacheManager) -> None:
    manager._rows.free.pop()


def give_a_row_twice(manager: KVCacheManager) -> None:
    manager._rows.free[0] = manager.row("here")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lose_a_free_page, "pages were lost, or came from nowhere"),
        (list_a_free_page_twice, "a free page is listed twice"),
        (give_a_held_page, "a page is held and free"),
        (give_a_cached_page, "a page is cached and free"),
        (cache_a_held_page, "a page is held and cached"),
        (hold_once_too_often, "holders are miscounted"),
        (forget_an_owner, "a page is cached that no lookup can find"),
        (own_a_free_page, "a page is free and can be found"),
        (miscount_the_cached, "cached pages are miscounted"),
        (miscount_the_held, "held pages are miscounted"),
        (miscount_bytes, "held bytes are miscounted"),
        (lose_a_row, "rows were lost, or came from nowhere"),
        (give_a_row_twice, "a row is free and a request's, or two requests'"),
    ],
)
def test_a_broken_pool_is_found(fault: Callable[[KVCacheManager], None], said: str) -> None:
    manager = make_manager(*ONE_SIZE)
    audit(manager)
    fault(manager)
    with pytest.raises(AssertionError, match=f"^{said}$"):
        audit(manager)


def test_a_lost_slab_is_found() -> None:
    manager = make_manager(*TWO_SIZES)
    audit(manager)
    pool_of(manager).free_list._free_slabs.pop()
    with pytest.raises(AssertionError, match=r"^idle slabs are miscounted$"):
        audit(manager)


# --- debug mode -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [ONE_SIZE, TWO_SIZES])
def test_the_verb_that_breaks_the_cache_is_named(
    specs: tuple[KVCacheSpec, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = audit_each_verb(make_manager(*specs))
    monkeypatch.setattr(pool_of(manager), "release_blocks", lambda *_, **__: None)
    with pytest.raises(AssertionError, match=r"^the cache is broken after 'free': "):
        manager.free("here")


def test_a_verb_that_raises_is_audited_too(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = audit_each_verb(make_manager(*ONE_SIZE))

    def lose_and_raise(*_: Any) -> None:
        lose_a_free_page(manager)
        raise RuntimeError("no room")

    monkeypatch.setattr(manager._coordinator, "extend_row", lose_and_raise)
    with pytest.raises(AssertionError, match=r"^the cache is broken after 'extend': pages were lost") as caught:
        manager.extend("here", 12)
    assert str(caught.value.__cause__) == "pages were lost, or came from nowhere"


def test_every_method_that_changes_something_is_audited() -> None:
    manager = audit_each_verb(make_manager(*ONE_SIZE))
    public = {name for name, value in vars(KVCacheManager).items() if not name.startswith("_") and callable(value)}
    assert public >= READERS
    assert public - READERS == {name for name in vars(manager) if name in public}
    assert "extend" not in vars(make_manager(*ONE_SIZE))


def test_many_rows_are_audited_at_once() -> None:
    manager = audit_each_verb(make_manager(*ONE_SIZE))
    rows = np.array([manager.row("here")])
    assert manager.extend_rows(rows, np.array([20]))
    pool_of(manager).blocks_held[0] += 1
    with pytest.raises(AssertionError, match=r"^the cache is broken after 'commit_rows': held pages are miscounted$"):
        manager.commit_rows(rows, np.array([10]))


def test_an_engine_in_debug_mode_stops_at_a_broken_cache(tmp_path: Any) -> None:
    model = TinyModel.save(tmp_path, "llama")
    prompt = ids(5, 20)
    with model.engine(audit=True) as engine:
        assert engine.generate([prompt])[0].finish_reason == "length"
        lose_a_free_page(manager_of(engine))
        engine.add_request(prompt)
        with pytest.raises(AssertionError, match=r"^the cache is broken after 'start': pages were lost"):
            engine.step()


def test_an_audit_without_the_kit_is_refused(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = TinyModel.save(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "kvframe_testing.audit", None)
    with pytest.raises(StackError, match=r"cache.audit counts pages by kvframe-testing, which is not installed"):
        model.engine(audit=True)
