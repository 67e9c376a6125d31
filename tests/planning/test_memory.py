"""An allocation for which there is too little memory is refused in one sentence, before the system grants it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from kvframe_attention_free import EncoderOnlySpec
from kvframe_engine.host_storage import HostStorage

from kvframe import Embedder
from kvframe.attention.copies import CopyScratch
from kvframe.attention.storage import KVCacheStorage, LocalCaches
from kvframe.cache.block_table import BlockTables
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import PlanError
from kvframe.contract.formats import StateTensor
from kvframe.contract.sizes import MAX_SIZE
from kvframe.contract.specs import LayerSpec
from kvframe.loading.checks import MAX_WHOLE
from kvframe.planning import memory
from kvframe.planning.groups import group_layers
from kvframe.planning.memory import allocating, check_host_bytes, free_bytes, physical_bytes
from kvframe.planning.plan import KVCachePlan, plan_cache
from tests.attention.attending import CPU, full, layer
from tests.models.serving import TinyModel, make_stack

ENCODER = layer("a", EncoderOnlySpec(block_size=4, num_kv_heads=1, head_size=4))
GROUPING = group_layers([LayerSpec(name="a", spec=full())])


def physical() -> int:
    num_bytes = physical_bytes()
    if num_bytes is None:
        pytest.skip("the operating system does not say how much memory there is")
    return num_bytes


def physical_pages() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        pytest.skip("the operating system does not say how much memory there is")


def plan_of(num_bytes: int) -> KVCachePlan:
    """Return a plan with the fewest slabs that take more than ``num_bytes``."""
    plan = plan_cache(GROUPING, memory_bytes=20_000, max_model_len=32, max_num_batched_tokens=8)
    return attrs.evolve(plan, num_slabs=num_bytes // plan.slab_bytes + 1)


def test_one_byte_more_than_the_machine_has_is_refused() -> None:
    check_host_bytes(physical(), "it is too much")
    with pytest.raises(PlanError, match=f"^it is too much; this process may use {physical()} bytes of memory$"):
        check_host_bytes(physical() + 1, "it is too much")


def test_if_the_system_does_not_report_its_memory_only_a_failed_allocation_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "physical_bytes", lambda: None)
    check_host_bytes(MAX_SIZE, "it is too much")
    with (
        pytest.raises(PlanError, match=r"^the host has no 9 bytes for it; ask for less$"),
        allocating(9, "for it", "less"),
    ):
        raise MemoryError


LIMITED = 2**28


def in_groups(folder: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> None:
    """Put this process into control groups with these files."""
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "_OWN_GROUPS", folder / "own")
    monkeypatch.setattr(memory, "_GROUPS", folder / "groups")


@pytest.mark.parametrize("place", ["", "pods/one/"])
def test_the_limit_of_a_container_counts(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        f"{place}memory.max": f"{LIMITED}\n",
        f"{place}memory.current": f"{LIMITED // 2}\n",
        f"{place}memory.stat": f"anon 5\ninactive_file {LIMITED // 4}\n",
        "pods/one/leaf/memory.max": "max\n",
        "pods/one/leaf/memory.current": "7\n",
    }
    in_groups(tmp_path, monkeypatch, "0::/pods/one/leaf\n", files)
    assert LIMITED == physical_bytes()
    assert LIMITED * 3 // 4 == free_bytes()
    with pytest.raises(PlanError, match=f"this process may use {LIMITED} bytes"):
        check_host_bytes(LIMITED + 1, "it is too much")


def test_the_limit_of_an_older_kind_of_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{LIMITED}\n",
        "memory/memory.usage_in_bytes": f"{LIMITED // 2}\n",
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {LIMITED // 4}\n",
    }
    in_groups(tmp_path, monkeypatch, "5:cpu,cpuacct:/x\n4:memory:/not/there\n0::/\n", files)
    assert LIMITED == physical_bytes()
    assert LIMITED * 3 // 4 == free_bytes()


@pytest.mark.parametrize("own", ["", "0::/pods\n", "0::/\n4:memory:/pods\n"])
def test_without_a_limit_the_machines_memory_counts(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages = physical_pages()
    in_groups(tmp_path, monkeypatch, own, {"pods/memory.max": "max\n", "pods/memory.current": "7\n"})
    assert pages == physical_bytes()


def test_memory_of_another_device_is_not_compared_with_the_hosts() -> None:
    with allocating(physical() + 1, "for it", "less", "meta"):
        torch.empty(physical() + 1, dtype=torch.uint8, device="meta")


def test_a_pool_beyond_the_machine_is_refused() -> None:
    with pytest.raises(PlanError, match=r"cpu has no \d+ bytes to give the cache; ask for less memory; this process"):
        KVCacheStorage(plan_of(physical()), GROUPING, CPU)
    storage = KVCacheStorage(plan_of(10_000), GROUPING, CPU)
    with pytest.raises(PlanError, match="to give the cache"):
        storage.reserve(plan_of(physical()))


def test_a_host_store_beyond_the_machine_is_refused() -> None:
    plan = plan_of(10_000)
    with pytest.raises(PlanError, match=r"the host has no \d+ bytes to keep evicted pages in; ask for less host_mem"):
        HostStorage(plan, KVCacheStorage(plan, GROUPING, CPU).pool, physical() // plan.slab_bytes + 1)


ALLOCATES: dict[str, Callable[[], Any]] = {
    "block tables": lambda: BlockTables(MAX_WHOLE, MAX_WHOLE, [16]),
    "block tables beyond NumPy": lambda: BlockTables(2**62, 2**62, [1]),
    "a cache manager": lambda: KVCacheManager(plan_of(10_000), max_num_seqs=MAX_WHOLE),
    "a cache manager without groups": lambda: KVCacheManager(
        plan_cache(group_layers([]), memory_bytes=0, max_model_len=1, max_num_batched_tokens=1), max_num_seqs=MAX_WHOLE
    ),
    "pages of a step": lambda: LocalCaches(
        [layer("a", EncoderOnlySpec(block_size=4, num_kv_heads=1, head_size=4))], CPU, max_tokens=2**50, max_reqs=1
    ),
    "copies of pages": lambda: CopyScratch(CPU).take({"k": StateTensor((2**50,), "float32")}, 1, is_static=False),
}


@pytest.mark.parametrize("what", ALLOCATES)
def test_whatever_grows_with_a_limit_is_refused(what: str) -> None:
    with pytest.raises(PlanError, match=r"^(the host|cpu) has no [0-9]+ bytes .*; ask for a smaller max_num_"):
        ALLOCATES[what]()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 2**43}, r"the host has no \d+ bytes in all: \d+ for the cache, 0 for evicted blocks"),
        ({"host_memory": MAX_SIZE}, r"for the cache, \d+ for evicted blocks"),
        ({"max_num_seqs": MAX_WHOLE}, f"for the tokens of {MAX_WHOLE} requests of 512"),
    ],
)
def test_an_engine_beyond_the_machine_is_refused(options: Any, message: str, models: Any) -> None:
    llama: TinyModel = models("llama")
    with pytest.raises(PlanError, match=message):
        llama.engine(**options)


def test_parts_that_fit_alone_and_not_together_are_refused(models: Any) -> None:
    llama: TinyModel = models("llama")
    share = physical() * 6 // 10
    with pytest.raises(PlanError, match=r"for the cache, [1-9][0-9]+ for evicted blocks"):
        llama.engine(memory=share, host_memory=share)


def test_a_cache_cannot_grow_beyond_the_machine(models: Any) -> None:
    llama: TinyModel = models("llama")
    with llama.engine() as engine:
        before = engine.plan
        with pytest.raises(PlanError, match="to give the cache; ask for less memory; this process may use"):
            engine.resize_cache(physical() + 2**20)
        assert before == engine.plan


def test_a_step_of_an_embedder_beyond_the_machine_is_refused(models: Any) -> None:
    bert: TinyModel = models("bert")
    with pytest.raises(PlanError, match="ask for a smaller max_num_batched_tokens"):
        Embedder.from_pretrained(bert.path, stack=make_stack(max_num_batched_tokens=MAX_WHOLE))
