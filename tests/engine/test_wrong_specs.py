"""A cache spec with wrong answers is refused at set-up, or ends the requests that reach the wrong answer; other
requests are not affected, and no block is held at the end."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import attrs
import pytest
import torch
from kvframe_testing.audit import audit, audit_each_verb

from kvframe import Engine, Layers, RequestOutput, Setup, Stack, load_plugins
from kvframe.builtin.full_attention import FullAttentionSpec
from kvframe.cache.manager import KVCacheManager
from kvframe.contract.errors import SpecError
from kvframe.contract.formats import StateTensor
from kvframe.contract.specs import AttentionMask, KVCacheSpec, LayerSpec, QuerySpec, TokenRange
from kvframe.planning.groups import group_layers
from kvframe.planning.layer_specs import make_layer_specs
from kvframe.planning.plan import KVCachePlan, plan_cache
from kvframe.planning.spec_check import check_spec_at_set_up, sampled_positions
from tests.cache.plans import RangeSpec, StateSpec, full, ranged
from tests.covering import few
from tests.models.serving import GREEDY, TinyModel, held_pages, ids, make_stack
from tests.support.engines import manager_of
from tests.support.layers import share_caches

MAX_LEN = 512


class SpecFailure(Exception):
    """The exception of a broken spec."""


def broken(n: int) -> Any:
    raise SpecFailure(f"no idea\nat {n}")


LIES: dict[str, tuple[Callable[[int], Any], str]] = {
    "raises": (broken, r"live_ranges\({n}\) failed: SpecFailure: no idea at {n}"),
    "exits": (lambda n: sys.exit(3), r"live_ranges\({n}\) failed: SystemExit: 3"),
    "overlaps": (lambda n: ((0, n), (n - 3, n)), r"live_ranges\({n}\) is \(\(0, {n}\), \(.*\)\); expected"),
    "is not sorted": (lambda n: ((n - 2, n), (0, 4)), r"live_ranges\({n}\) is .*sorted, disjoint"),
    "is negative": (lambda n: ((-4, n),), r"live_ranges\({n}\) is \(\(-4, {n}\),\)"),
    "is a float": (lambda n: ((0.0, n),), r"live_ranges\({n}\) is \(\(0.0, {n}\),\).* pairs of int"),
    "is a bool": (lambda n: ((False, n),), r"live_ranges\({n}\) is \(\(False, {n}\),\).* pairs of int"),
    "is in the future": (lambda n: ((0, n + 1),), r"live_ranges\({n}\) is .* within \[0, {n}\)"),
    "is empty within": (lambda n: ((0, 3), (5, 5)), r"live_ranges\({n}\) is .* not empty"),
    "is no pair": (lambda n: (0, n), r"live_ranges\({n}\) is \(0, {n}\)"),
    "is a triple": (lambda n: ((0, n, n),), r"live_ranges\({n}\) is "),
    "is a list": (lambda n: [(0, n)], r"live_ranges\({n}\) is \[\(0, {n}\)\]; expected a tuple of pairs"),
    "has a list": (lambda n: ([0, n],), r"live_ranges\({n}\) is \(\[0, {n}\],\); expected a tuple of pairs"),
    "is a string": (lambda n: "all", r"live_ranges\({n}\) is 'all'"),
    "is nothing": (lambda n: None, r"live_ranges\({n}\) is None"),
    "forgets": (lambda n: (), r"live_ranges\(\d+\) is .* (token \d+ among them|none of the)"),
}


@attrs.frozen(kw_only=True)
class LyingSpec(RangeSpec):
    """A window by live ranges only, with one wrong answer; ``peak_blocks`` is right."""

    kind = "lying"

    lie: str = "raises"
    where: tuple[int, ...] = ()

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        if n in self.where:
            lied: tuple[TokenRange, ...] = LIES[self.lie][0](n)
            return lied
        return super().live_ranges(n)

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        most = -(-(self.window + max_new_tokens + self.block_size - 1) // self.block_size) + 1
        return min(most, -(-num_tokens // self.block_size))


def lying(where: int, lie: str = "raises", window: int = 9, block_size: int = 4) -> LyingSpec:
    return LyingSpec(block_size=block_size, num_kv_heads=1, head_size=4, window=window, lie=lie, where=(where,))


def plan_of(*specs: KVCacheSpec, max_model_len: int = MAX_LEN) -> KVCachePlan:
    layers = [LayerSpec(name=f"layer{index}", spec=spec) for index, spec in enumerate(specs)]
    return plan_cache(group_layers(layers), memory_bytes=2**20, max_model_len=max_model_len, max_num_batched_tokens=32)


def unsampled(spec: KVCacheSpec, remainder: int | None = None) -> int:
    """Return a position such that set-up does not check it or its neighbours."""
    asked: set[int] = set()

    class Asked(type(spec)):  # type: ignore[misc]
        def live_ranges(self, n: int) -> Any:
            asked.update((n - 1, n, n + 1))
            return super().live_ranges(n)

    fields = {field.name: getattr(spec, field.name) for field in attrs.fields(type(spec))}
    for max_new_tokens in (24, 32, 48):
        check_spec_at_set_up(Asked(**fields), MAX_LEN, max_new_tokens)
    return next(n for n in range(70, MAX_LEN) if remainder in (None, n % spec.block_size) and n not in asked)


# --- at set-up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [37, 63, 128, 511, 512])
@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_answer_at_a_sampled_position_is_refused_at_set_up(lie: str, where: int) -> None:
    if (lie, where) == ("forgets", 512):
        pytest.skip("nothing comes after the last position that would show it")
    with pytest.raises(
        SpecError, match="^the cache spec 'lying': " + LIES[lie][1].replace("{n}", str(where))
    ) as caught:
        plan_of(full(), lying(where, lie))
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(
        "correct tests.engine.test_wrong_specs.LyingSpec, and run kvframe_testing.laws.check_spec on it"
    )


@attrs.frozen(eq=False)
class Said:
    """The answer to one question."""

    name: str
    answer: Any


@attrs.frozen(kw_only=True)
class Variant(RangeSpec):
    """A window with one given answer."""

    kind = "variant"

    said: Said = attrs.field(factory=lambda: Said("", None))

    def _say(self, name: str, otherwise: Any) -> Any:
        said = self.said.answer if name == self.said.name else otherwise
        if isinstance(said, Exception):
            raise said
        return said

    def live_blocks(self, n: int) -> Any:
        return self._say("live_blocks", super().live_blocks(n))

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> Any:
        return self._say("stored_blocks", super().stored_blocks(n, num_new_tokens, branch))

    def num_resident_blocks(self, n: int, num_new_tokens: int) -> Any:
        return self._say("num_resident_blocks", super().num_resident_blocks(n, num_new_tokens))

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> Any:
        return self._say("peak_blocks", super().peak_blocks(num_tokens, max_new_tokens))

    def state_tensors(self) -> Any:
        return self._say("state_tensors", super().state_tensors())

    @property
    def mask(self) -> Any:
        return self._say("mask", None)

    @property
    def mask_function(self) -> Any:
        return self._say("mask_function", None)


STATE = StateTensor((1,), "float32")
WRONG: dict[str, list[Any]] = {
    "live_blocks": [((0, 9),), None, SpecFailure()],
    "stored_blocks": [(), [(0, 1)], ((0, 0),), ((-1, 1),), ((0, 900),), None, 3, SpecFailure()],
    "num_resident_blocks": [0, -1, 2.0, None, True, SpecFailure()],
    "peak_blocks": [0, 1, -1, 3.0, None, 10**9, SpecFailure()],
    "state_tensors": [
        None,
        {"k": 3},
        {3: StateTensor((1,), "float32")},
        {"k": StateTensor((0,), "float32")},
        SpecFailure(),
    ],
    "mask": [
        7,
        AttentionMask(window=20),
        SpecFailure(),
    ],
    "mask_function": [lambda query, key: key <= query, AttentionMask(window=5).sees, lambda query: True, SpecFailure()],
}


@pytest.mark.parametrize(("name", "answer"), [(name, each) for name, wrong in WRONG.items() for each in wrong])
def test_every_other_wrong_answer_is_refused_at_set_up(name: str, answer: Any) -> None:
    spec = Variant(block_size=4, num_kv_heads=1, head_size=4, window=9)
    assert plan_of(spec).groups[0].peak_blocks == ranged(window=9).peak_blocks(MAX_LEN, 32)
    with pytest.raises(SpecError, match=rf"^the cache spec 'variant': (mask|live_ranges|{name})\b"):
        plan_of(attrs.evolve(spec, said=Said(name, answer)))


def test_a_spec_whose_state_tensors_change_is_refused_at_set_up() -> None:
    sizes = itertools.count(1)

    class Unsteady(FullAttentionSpec):
        kind = "unsteady"

        def state_tensors(self) -> Mapping[str, StateTensor]:
            return {"k": StateTensor((next(sizes),), "float32")}

    said = r"^the cache spec 'unsteady': state_tensors\(\) is .*\(\d+,\).*; expected .*, as when it was asked before: "
    with pytest.raises(SpecError, match=said):
        plan_of(Unsteady(block_size=4, num_kv_heads=1, head_size=4))


def test_what_is_right_but_written_otherwise_is_taken() -> None:
    mask, smaller = AttentionMask(window=9), AttentionMask(window=5)
    for said in (("mask_function", mask.sees), ("mask", mask), ("mask", smaller)):
        plan_of(Variant(block_size=4, num_kv_heads=1, head_size=4, window=9, said=Said(*said)))


def test_a_spec_that_answers_no_further_than_requests_go_is_taken() -> None:
    spec = LyingSpec(block_size=4, num_kv_heads=1, head_size=4, window=9, where=tuple(range(65, 2000)))
    assert 1 == len(plan_of(spec, max_model_len=64).groups)
    manager = KVCacheManager(plan_of(spec, max_model_len=64), max_num_seqs=1)
    manager.start("one", tokens := [1] * 64)
    assert manager.extend("one", 64)
    manager.commit("one", tokens, 64)
    audit(manager)


@attrs.frozen(kw_only=True)
class UnhashableSpec(RangeSpec):
    """A type with a field that cannot be hashed, and without a form that keeps every token."""

    kind = "unhashable"

    sizes: list[int] = attrs.field(factory=list)

    def retain_all(self) -> Any:
        return self.sizes


def test_what_groups_are_made_by_is_checked_too() -> None:
    layers = [LayerSpec(name="a", spec=UnhashableSpec(block_size=4, num_kv_heads=1, head_size=4, window=9))]
    with pytest.raises(SpecError, match=r"^the cache spec 'unhashable': group_key failed: TypeError: unhashable"):
        group_layers(layers)
    with pytest.raises(SpecError, match=r"^the cache spec 'unhashable': retain_all\(\) failed: AttributeError"):
        group_layers(layers, hybrid=False)


def test_a_spec_that_lies_where_it_shares_a_cache_is_refused_with_its_sentence() -> None:
    layers = [LayerSpec(name="a", spec=full()), LayerSpec(name="b", spec=lying(8))]
    with pytest.raises(SpecError, match=r"^the cache spec 'lying': live_ranges\(8\) failed"):
        share_caches(layers, {"b": "a"})


@pytest.mark.parametrize("max_tokens", [1, 5, 64, 512, 1 << 20, (1 << 20) + 37])
def test_set_up_asks_at_few_positions_however_long_requests_are(max_tokens: int) -> None:
    positions = sampled_positions(ranged(window=100), max_tokens)
    assert [*range(min(64, max_tokens + 1))] == positions[:64]
    assert max_tokens == positions[-1]
    assert len(positions) < 300


def test_checking_specs_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, json; from kvframe.planning.plan import plan_cache\n"
        "from kvframe.planning.groups import group_layers\n"
        "from kvframe.contract.specs import LayerSpec; from kvframe.builtin.full_attention import FullAttentionSpec\n"
        "spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4)\n"
        "plan_cache(group_layers([LayerSpec(name='a', spec=spec)]), memory_bytes=2**20, max_model_len=1 << 20,\n"
        "    max_num_batched_tokens=64)\n"
        "print(json.dumps(sorted({'torch', 'numpy'} & set(sys.modules))))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [] == json.loads(found.stdout)


@attrs.frozen(kw_only=True)
class NeedySpec(RangeSpec):
    """A window that says wrongly which learned tensors a layer needs."""

    kind = "needy"

    answer: Callable[[], Any]

    def parameters(self, query: QuerySpec) -> Any:
        return self.answer()


@pytest.mark.parametrize(
    ("answer", "failure"), [(lambda: 7, "TypeError"), (lambda: broken(0), "SpecFailure: no idea at 0")]
)
def test_a_wrong_answer_about_learned_tensors_is_refused_when_backends_are_set_up(
    answer: Callable[[], Any], failure: str
) -> None:
    spec = NeedySpec(block_size=4, num_kv_heads=2, head_size=8, dtype="float32", window=9, answer=answer)
    layer = LayerSpec(name="a", spec=spec, query=QuerySpec(num_heads=4, head_size=8, scale=0.5))
    with pytest.raises(SpecError, match=rf"the cache spec 'needy': parameters\(query\) failed: {failure}.* correct"):
        Layers.on_host_pages([layer], Stack(), load_plugins().registry, torch.device("cpu"))


@pytest.mark.parametrize("mask", [7, "all"])
def test_a_mask_that_is_none_is_the_fault_of_its_spec_and_of_no_backend(mask: Any) -> None:
    spec = Variant(block_size=4, num_kv_heads=2, head_size=8, dtype="float32", window=9, said=Said("mask", mask))
    layer = LayerSpec(name="a", spec=spec, query=QuerySpec(num_heads=4, head_size=8, scale=0.5))
    with pytest.raises(SpecError, match=r"^the cache spec 'variant': mask is .*; expected None or an AttentionMask"):
        Layers.on_host_pages([layer], Stack(), load_plugins().registry, torch.device("cpu"))


# --- while requests run -----------------------------------------------------------------------------------------------


def engine_of(model: TinyModel, spec: Callable[[KVCacheSpec], KVCacheSpec], **options: Any) -> Engine:
    """Return an engine whose layers' specs are replaced by ``spec``."""
    stack = make_stack(**{"block_size": 4, "audit": True, "max_model_len": MAX_LEN, "max_num_seqs": 4, **options})
    layers = make_layer_specs(model.loaded.description, model.registry, stack, "float32")
    changed = [attrs.evolve(each, spec=None if each.spec is None else spec(each.spec)) for each in layers]
    return Engine(
        model.loaded,
        Setup(description=model.loaded.description, layers=changed, stack=stack, registry=model.registry),
        poison_freed=True,
    )


def window_of(lie: str | None = None, where: int = 0) -> Callable[[Any], KVCacheSpec]:
    def make(spec: Any) -> KVCacheSpec:
        sizes: Mapping[str, Any] = {
            name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")
        }
        return RangeSpec(window=9, **sizes) if lie is None else LyingSpec(window=9, lie=lie, where=(where,), **sizes)

    return make


def serve(engine: Engine, prompts: list[list[int]]) -> list[RequestOutput]:
    """Serve requests to their ends by ``step``, which must not raise; check that no block is held at the end."""
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    last: dict[str, RequestOutput] = {}
    for _ in range(400):
        last |= {output.request_id: output for output in engine.step()}
        if not engine.has_unfinished:
            break
    assert 0 == held_pages(engine)
    audit(manager_of(engine))
    return [last[name] for name in names]


WHERE = {remainder: unsampled(lying(MAX_LEN + 9), remainder) for remainder in (0, 1, 3)}


def prompts_around(where: int) -> list[list[int]]:
    """Return prompts that reach a position, the second one while it generates, and others that do not."""
    return [ids(1, 9), ids(2, where - 3), ids(3, 40), ids(4, where + 6)]


@pytest.fixture(scope="module")
def right_tokens(llama: TinyModel) -> Callable[[int], list[tuple[int, ...]]]:
    """Return the tokens of the prompts around a position with a spec that answers right."""

    @cache
    def make(remainder: int) -> list[tuple[int, ...]]:
        with engine_of(llama, window_of(), max_num_batched_tokens=48) as engine:
            return [output.token_ids for output in serve(engine, prompts_around(WHERE[remainder]))]

    return make


@pytest.mark.parametrize(
    ("lie", "remainder"),
    few(7, [*((lie, 1) for lie in LIES), *((lie, each) for lie in ("forgets", "raises") for each in (0, 3))]),
)
def test_a_request_that_reaches_a_wrong_answer_ends_and_others_do_not_notice(
    llama: TinyModel, right_tokens: Callable[[int], list[tuple[int, ...]]], lie: str, remainder: int
) -> None:
    where, prompts = WHERE[remainder], prompts_around(WHERE[remainder])
    expected = right_tokens(remainder)
    with engine_of(llama, window_of(lie, where), max_num_batched_tokens=48) as engine:
        for _ in range(2):
            found = serve(engine, prompts)
            assert ["length", "error", "length", "error"] == [output.finish_reason for output in found]
            for index in (0, 2):
                assert expected[index] == found[index].token_ids
            for index in (1, 3):
                assert expected[index][: len(found[index].token_ids)] == found[index].token_ids
                assert "no further token of it can be computed: the cache spec 'lying': " in str(found[index].error)
            assert len(found[1].token_ids) < len(expected[1])
        # Alone, it has no other request to continue with.
        assert ["error"] == [output.finish_reason for output in serve(engine, [prompts[1]])]
        assert expected[0] == serve(engine, [prompts[0]])[0].token_ids


@pytest.mark.parametrize("host_memory", [None, "1MiB"])
def test_a_wrong_answer_under_pressure_ends_its_requests_and_no_others(
    llama: TinyModel, host_memory: str | None
) -> None:
    where = WHERE[1]
    prompts = [ids(index, 20 + 11 * index) for index in range(1, 8)]
    options = {"max_num_batched_tokens": 24, "memory": 40 * 1024, "host_memory": host_memory}
    with engine_of(llama, window_of(), max_num_batched_tokens=24) as engine:
        expected = [output.token_ids for output in serve(engine, prompts)]
    with engine_of(llama, window_of("raises", where), **options) as engine:
        found = serve(engine, prompts)
        assert engine.stats().preemptions
        for prompt, output, tokens in zip(prompts, found, expected, strict=True):
            assert output.token_ids == tokens[: len(output.token_ids)]
            assert ("error" if len(prompt) + len(tokens) > where else "length") == output.finish_reason


@attrs.frozen(kw_only=True)
class LyingState(StateSpec):
    """A state whose stored blocks are wrong from one position on."""

    kind = "lying_state"

    said: Any = attrs.field(default=None, hash=False)
    where: tuple[int, ...] = ()

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> Any:
        if n not in self.where:
            return super().stored_blocks(n, num_new_tokens, branch)
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    def peak_blocks(self, num_tokens: int, max_new_tokens: int) -> int:
        return min(4, -(-num_tokens // self.block_size))


@pytest.mark.parametrize(
    "answer", [(), ((0, 1),), ((-2, 500),), ((1.0, 2.0),), None, SpecFailure("no"), ((9**9, 9**9 + 1),)]
)
def test_wrong_stored_blocks_are_refused_and_change_nothing(answer: Any) -> None:
    where = unsampled(LyingState(block_size=4))
    plan = plan_of(full(), LyingState(block_size=4, said=answer, where=(where,)))
    manager = audit_each_verb(KVCacheManager(plan, max_num_seqs=2))
    tokens = [3] * 200
    for name in ("one", "other"):
        manager.start(name, tokens, salt=name)
        assert manager.extend(name, where)
        manager.commit(name, tokens, where)
    before = manager.block_ids("one"), manager.num_held_pages, manager.stats
    with pytest.raises(SpecError, match=rf"^the cache spec 'lying_state': stored_blocks\({where}, 4, \d+\)"):
        manager.extend("one", where + 4)
    assert before == (manager.block_ids("one"), manager.num_held_pages, manager.stats)
    for name in ("one", "other"):
        manager.free(name)
    assert 0 == manager.num_held_pages


def test_a_row_whose_spec_answered_wrongly_goes_nowhere_and_can_be_freed() -> None:
    where = WHERE[1]
    plan = plan_of(full(), lying(where))
    manager = audit_each_verb(KVCacheManager(plan, max_num_seqs=3))
    tokens = [5] * 200
    manager.start("one", tokens)
    assert manager.extend("one", where)
    manager.commit("one", tokens, where)
    before = manager.block_ids("one")
    assert manager.extend("one", where - 9)
    with pytest.raises(SpecError, match=rf"live_ranges\({where}\) failed"):
        manager.extend("one", where + 1)
    assert before == manager.block_ids("one")
    manager.free("one")
    assert (0, 3) == (manager.num_held_pages, manager.num_free_rows)
