"""State layers at run time: the state from which each token continues, and the page to which the new state goes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.state import RollbackTable, state_step
from kvframe.cli import main
from kvframe.config.stack import Stack
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError
from kvframe.contract.specs import KVCacheSpec, LayerSpec, StateTensor, TokenRange
from kvframe.contract.state import StateRun, StateStep
from kvframe.loading.plugins import load_plugins
from kvframe.planning.rollback import RollbackSpec
from kvframe.selection.select import select_backends
from kvframe.selection.skipping import find_skippable_layers
from tests.attention.attending import CPU, Bench, full, layer


@attrs.frozen(kw_only=True)
class SumSpec(KVCacheSpec):
    """One number per request; a page for every ``every``-th block and the last two."""

    kind = "sum"

    num_states: int = 1
    every: int = 1
    num_rollback: int = 0

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((n - 1, n),) if n else ()

    @property
    def states_per_block(self) -> int:
        return self.num_states

    @property
    def num_rollback_states(self) -> int:
        return self.num_rollback

    def state_tensors(self) -> Mapping[str, StateTensor]:
        return {"sum": StateTensor((self.num_states, 2), "float64")}

    def stored_blocks(self, n: int, num_new_tokens: int, branch: int = 0) -> tuple[TokenRange, ...]:
        first, stop = n // self.block_size, -(-(n + num_new_tokens) // self.block_size)
        blocks = [b for b in range(first, stop) if b % self.every == 0 or b >= stop - 2 or b * self.block_size < n]
        return tuple((block, block + 1) for block in blocks)


def step_of(
    requests: Sequence[tuple[int, int]],
    table: Sequence[Sequence[int]],
    num_states: int = 1,
    block_size: int = 4,
    rollback: RollbackTable | None = None,
) -> StateStep:
    """Return the step of requests (tokens computed before, tokens to compute), one in each row of the table."""
    computed, new = np.array(requests).T
    spec = SumSpec(block_size=block_size, num_states=num_states)
    return state_step(np.arange(len(requests)), computed, new, np.array(table, dtype=np.int32), spec, CPU, rollback)


def two_more(*rows: Sequence[int]) -> RollbackTable:
    """Return a table of pages of two rollback states, ten block ids apart."""
    return RollbackTable(np.array(rows, dtype=np.int32), num_states=2, ids_per_state=10)


def rounds_of(step: StateStep) -> list[list[tuple[int, ...]]]:
    """Return (row, source page, its place, target page, its place) of each row of each round."""
    return [
        list(
            zip(
                *(
                    column.tolist()
                    for column in (
                        each.rows,
                        each.source_pages,
                        each.source_places,
                        each.target_pages,
                        each.target_places,
                    )
                ),
                strict=True,
            )
        )
        for each in step.rounds
    ]


def test_single_tokens_of_all_requests_are_one_round() -> None:
    # Within block 1; at the start of block 2; the second token of all.
    step = step_of([(5, 1), (8, 1), (1, 1)], [[0, 11, 0], [0, 21, 22], [30, 0, 0]])
    assert [[(0, 11, 0, 11, 0), (1, 21, 0, 22, 0), (2, 30, 0, 30, 0)]] == rounds_of(step)
    assert () == step.runs


def test_a_token_without_a_past_is_a_run() -> None:
    step = step_of([(5, 1), (0, 1)], [[0, 11], [30, 0]])
    assert [[(0, 11, 0, 11, 0)]] == rounds_of(step)
    assert (StateRun(1, 2, None, (30, 0)),) == step.runs


def test_a_prompt_is_cut_where_a_block_with_a_page_ends() -> None:
    step = step_of([(0, 14)], [[0, 5, 0, 6]])
    assert (StateRun(0, 8, None, (5, 0)), StateRun(8, 14, (5, 0), (6, 0))) == step.runs
    assert () == step.rounds


def test_a_chunk_goes_on_from_the_page_before_it_and_into_its_own_block() -> None:
    step = step_of([(3, 1), (6, 7), (4, 5)], [[9, 0, 0, 0], [0, 5, 6, 7], [3, 4, 8, 0]])
    assert [[(0, 9, 0, 9, 0)]] == rounds_of(step)
    assert [
        StateRun(1, 3, (5, 0), (5, 0)),
        StateRun(3, 7, (5, 0), (6, 0)),
        StateRun(7, 8, (6, 0), (7, 0)),
        StateRun(8, 12, (3, 0), (4, 0)),
        StateRun(12, 13, (4, 0), (8, 0)),
    ] == list(step.runs)


def test_few_tokens_are_rounds_where_a_page_holds_a_state_for_each() -> None:
    step = step_of([(6, 3), (9, 1), (0, 4)], [[0, 5, 6], [0, 0, 7], [8, 0, 0]], num_states=3)
    assert [
        [(0, 5, 2, 5, 0), (3, 7, 2, 7, 0)],
        [(1, 5, 0, 5, 1)],
        [(2, 5, 1, 6, 2)],
    ] == rounds_of(step)
    assert (StateRun(4, 8, None, (8, 0)),) == step.runs


def test_few_tokens_across_a_block_without_a_page_are_a_run() -> None:
    step = step_of([(3, 3)], [[5, 0]], num_states=3)
    assert () == step.rounds
    step = step_of([(3, 6)], [[5, 0, 6]], num_states=6)
    assert () == step.rounds
    assert (StateRun(0, 1, (5, 2), (5, 3)), StateRun(1, 6, (5, 3), (6, 2))) == step.runs


def test_states_take_turns_in_both_pages_and_a_blocks_last_one_is_in_its_own() -> None:
    rollback = two_more([100, 200, 300])
    # The places of tokens 4 to 7 of block 1, and of token 8 of block 2.
    places = [(6, 0), (210, 0), (200, 0), (6, 0), (7, 0)]
    for n, (source, target) in enumerate(pairwise(places), 5):
        assert [[(0, *source, *target)]] == rounds_of(step_of([(n, 1)], [[5, 6, 7]], rollback=rollback))


def test_a_token_and_its_drafts_are_rounds_across_a_blocks_end() -> None:
    rollback = two_more([0, 50, 60], [0, 0, 70], [80, 0, 0])
    step = step_of([(6, 3), (9, 1), (0, 3)], [[0, 5, 6], [0, 0, 7], [8, 0, 0]], rollback=rollback)
    assert [
        [(0, 60, 0, 50, 0), (3, 7, 0, 80, 0)],
        [(1, 50, 0, 5, 0)],
        [(2, 5, 0, 6, 0)],
    ] == rounds_of(step)
    assert (StateRun(4, 7, None, (80, 0)),) == step.runs


def test_more_tokens_than_there_are_states_are_a_run_to_the_blocks_end_and_one_to_the_steps() -> None:
    step = step_of([(5, 4), (5, 5)], [[0, 5, 6], [0, 7, 8]], rollback=two_more([0, 50, 60], [0, 70, 80]))
    assert () == step.rounds
    assert [
        StateRun(0, 3, (5, 0), (5, 0)),
        StateRun(3, 4, (5, 0), (6, 0)),
        StateRun(4, 7, (7, 0), (7, 0)),
        StateRun(7, 9, (7, 0), (90, 0)),
    ] == list(step.runs)


def test_without_a_page_of_rollback_states_drafts_are_a_run() -> None:
    assert () == step_of([(5, 2)], [[0, 5]], rollback=two_more([0, 0])).rounds


def run(step: StateStep, pages: Mapping[str, torch.Tensor], tokens: torch.Tensor) -> None:
    """Make each state half of the one before, plus the token."""
    for each in step.rounds:
        before = each.read(pages)["sum"]
        each.write(pages, {"sum": before / 2 + tokens[each.rows, None]})
    for piece in step.runs:
        found = piece.read(pages)
        state = torch.zeros(1, 2, dtype=torch.float64) if found is None else found["sum"]
        for token in tokens[piece.start : piece.stop]:
            state = state / 2 + token
        piece.write(pages, {"sum": state})


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 3),
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(0, 3)), max_size=3),
        min_size=1,
        max_size=8,
    ),
)
def test_any_steps_leave_in_every_page_what_one_token_after_the_other_gives(
    block_size: int, num_states: int, num_rollback: int, every: int, steps: list[list[tuple[int, int, int]]]
) -> None:
    num_states = 1 if num_rollback else num_states
    most_in_rounds = num_states + num_rollback
    spec = SumSpec(block_size=block_size, num_states=num_states, every=every, num_rollback=num_rollback)
    pages = {"sum": torch.full((700, num_states, 2), torch.nan, dtype=torch.float64)}
    table = np.zeros((3, 120), dtype=np.int32)
    rollback = RollbackTable(np.zeros_like(table), num_rollback, ids_per_state=1) if num_rollback else None
    more = RollbackSpec(block_size=block_size, num_states=num_rollback) if num_rollback else None
    computed, next_page = [0, 0, 0], 1
    values = torch.arange(1, 1201, dtype=torch.float64).reshape(3, 400)
    after = torch.zeros(3, 401, dtype=torch.float64)
    for index in range(400):
        after[:, index + 1] = after[:, index] / 2 + values[:, index]
    for chosen in steps:
        requests = {request: (new, rejected) for request, new, rejected in chosen}
        if not requests:
            continue
        rows = np.array(list(requests))
        starts = np.array([computed[row] for row in rows])
        new = np.array([each[0] for each in requests.values()])
        full_pages = {
            page: pages["sum"][page].clone()
            for row in rows
            for page in table[row, : computed[row] // block_size]
            if page
        }
        for row, start, count in zip(rows, starts, new, strict=True):
            for first, stop in spec.stored_blocks(start, count):
                for block in range(first, stop):
                    if not table[row, block]:
                        table[row, block], next_page = next_page, next_page + 1
            for first, stop in () if more is None else more.stored_blocks(start, count):
                for block in range(first, stop):
                    if rollback is not None and not rollback.ids[row, block]:
                        rollback.ids[row, block], next_page = next_page, next_page + num_rollback
        step = state_step(rows, starts, new, table, spec, CPU, rollback)
        packed = [values[row, start : start + count] for row, start, count in zip(rows, starts, new, strict=True)]
        run(step, pages, torch.cat(packed))
        covered = [row for each in step.rounds for row in each.rows.tolist()]
        covered += [row for piece in step.runs for row in range(piece.start, piece.stop)]
        assert list(range(sum(new))) == sorted(covered)
        for page, before in full_pages.items():
            assert torch.equal(before.nan_to_num(), pages["sum"][page].nan_to_num())
        for row, start, (count, rejected) in zip(rows, starts, requests.values(), strict=True):
            has_pages = table[row, np.arange(start, start + count) // block_size].all()
            in_rounds = 0 < start and count <= most_in_rounds and has_pages
            taken_back = min(rejected, count - 1) if in_rounds else 0
            computed[row] = int(start) + count - taken_back
            for block in range(start // block_size, -(-computed[row] // block_size)):
                last = min((block + 1) * block_size, computed[row])
                page, place = table[row, block], (last - 1) % num_states
                turn = ((block + 1) * block_size - last) % (1 + num_rollback)
                if page and turn and rollback is not None:
                    assert rollback.ids[row, block]
                    page, place = rollback.ids[row, block] + turn - 1, 0
                if page:
                    assert after[row, last] == pages["sum"][page, place, 0]


# --- beside layers that attend ----------------------------------------------------------------------------------------


def states(name: str, num_states: int = 1) -> LayerSpec:
    return LayerSpec(name=name, spec=SumSpec(block_size=4, num_states=num_states))


def test_state_layers_have_pages_and_no_backend() -> None:
    bench = Bench([layer("a", full()), states("s"), states("t", 2), layer("b", full())])
    assert ["a", "b"] == list(bench.attention)
    assert [("a", "b")] == bench.groups()
    assert ["s", "t"] == list(bench.attention.states)
    assert [(1, 2), (2, 2)] == [each.pages["sum"].shape[1:] for each in bench.attention.states.values()]
    assert GraphCapture.ALWAYS == Bench([states("s"), states("t", 2)]).attention.capture


def test_a_step_at_the_size_of_a_graph_has_added_rows_in_the_null_page() -> None:
    bench = Bench([states("s", 2), states("t", 3)])
    for name, length in (("0", 8), ("1", 3)):
        bench.manager.start(name, [0] * 64)
        assert bench.manager.extend(name, length)
    rows, tables, layers = np.array([bench.manager.row(name) for name in "01"]), bench.manager.tables, bench.attention

    def padded(*requests: tuple[int, int], sizes: tuple[int, int] = (3, 2)) -> list[StateStep] | None:
        computed, new = np.array(requests).T
        batch = StepBatch(rows=rows, num_computed=computed, query_lens=new, generating_indices=np.cumsum(new) - 1)
        return layers.states.rounds(batch, tables, *sizes)

    assert 2 == layers.states.max_rounds
    of_two, of_three = padded((6, 2), (2, 1)) or []
    (_, first), (second, _) = (tables[0].ids[row, :2].tolist() for row in rows)
    assert [
        [(0, first, 1, first, 0), (2, second, 1, second, 0), (5, 0, 0, 0, 0)],
        [(1, first, 0, first, 1), (5, 0, 0, 0, 0), (5, 0, 0, 0, 0)],
    ] == rounds_of(of_two)
    assert [(3, 3)] * 2 == [(len(each.rows), len(each.target_pages)) for each in of_three.rounds]
    # A request without earlier tokens, and one with more tokens than a page has states, need runs.
    assert padded((0, 1), (2, 1)) is None
    assert padded((5, 3), (2, 1), sizes=(3, 3)) is None
    for step in layers.states.rounds(None, tables, 1, 2) or []:
        assert [[(1, 0, 0, 0, 0)]] * 2 == rounds_of(step)


def test_layers_of_one_group_hold_the_same_step() -> None:
    bench = Bench([layer("a", full()), states("s"), states("t")])
    for name, length in (("0", 6), ("1", 1), ("2", 3)):
        bench.manager.start(name, [0] * 64)
        assert bench.manager.extend(name, length)
    batch = StepBatch(
        rows=np.array([bench.manager.row(name) for name in "012"]),
        num_computed=np.zeros(3, dtype=np.int64),
        query_lens=np.array([6, 1, 3]),
        generating_indices=np.array([5, 6, 9]),
    )
    metadata = build_metadata(batch, bench.manager.tables, CPU)
    bench.attention.begin_step(metadata, batch=batch, tables=bench.manager.tables)
    step = bench.attention.states["s"].step
    assert step is bench.attention.states["t"].step
    assert [(0, 4), (4, 6), (6, 7), (7, 10)] == [(run.start, run.stop) for run in step.runs]
    page = bench.manager.block_ids("2")[1][0]
    assert StateRun(7, 10, None, (page, 0)) == step.runs[-1]


def test_rollback_states_are_parts_of_pages_of_the_group_after_that_of_the_layers() -> None:
    spec = SumSpec(block_size=4, num_rollback=3)
    bench = Bench([layer("a", full()), LayerSpec(name="s", spec=spec), LayerSpec(name="t", spec=spec)])
    manager, attention = bench.manager, bench.attention
    manager.start("one", [0] * 64)
    assert manager.extend("one", 6)
    manager.commit("one", [0] * 64, 6)
    assert manager.extend("one", 9)
    batch = StepBatch(
        rows=np.array([manager.row("one")]),
        num_computed=np.array([6]),
        query_lens=np.array([3]),
        generating_indices=np.arange(3),
    )
    metadata = build_metadata(batch, manager.tables, CPU)
    attention.begin_step(metadata, batch=batch, tables=manager.tables)
    step, (_, own, others) = attention.states["t"].step, manager.block_ids("one")
    ids_per_state = manager.plan.groups[1].page_bytes // manager.plan.block_id_bytes
    # After token 5 of block 1, the state two before the block's last one; after token 6, the one before the last.
    places = [(others[1] + ids_per_state, 0), (others[1], 0), (own[1], 0), (others[2] + 2 * ids_per_state, 0)]
    assert [[(row, *places[row], *places[row + 1])] for row in range(3)] == rounds_of(step)


def test_a_model_of_states_alone_has_no_attention_groups() -> None:
    bench = Bench([states("s")])
    assert ((), 0, ["s"]) == (bench.attention.groups, len(bench.attention), list(bench.attention.states))


@pytest.mark.parametrize(
    ("rule", "what"),
    [({"backend": "torch"}, "the backend 'torch'"), ({"wrappers": ["decode_only"]}, "the wrapper 'decode_only'")],
)
def test_a_backend_or_wrapper_for_a_state_layer_is_refused(rule: dict[str, object], what: str) -> None:
    layers = [layer("a", full()), states("s")]
    registry = load_plugins().registry
    stack = Stack.from_mapping({"rules": [{"layers": "*", **rule}]})
    with pytest.raises(BackendError, match=f"gives layer 's' {what}, but a 'sum' layer does not attend"):
        select_backends(layers, stack, registry, "cpu")


def test_a_rule_for_another_kind_and_the_backend_auto_leave_state_layers_alone() -> None:
    layers = [layer("a", full()), states("s")]
    rules = [{"layers": "*", "backend": "auto"}, {"kind": "full_attention", "backend": "torch"}]
    choices = select_backends(layers, Stack.from_mapping({"rules": rules}), load_plugins().registry, "cpu")
    assert ["a"] == [choice.layer for choice in choices]


def test_a_state_layer_needs_every_token_and_so_do_the_layers_before_it() -> None:
    shared = [layer("b", full(), "a"), layer("c", full(), "a")]
    assert ("b", "c") == find_skippable_layers([states("s"), layer("a", full()), *shared])
    assert ("c",) == find_skippable_layers([layer("a", full()), shared[0], states("s"), shared[1]])


# --- in a layer file --------------------------------------------------------------------------------------------------

LAYER_FILE = """
max_model_len = 4096

[[layers]]
name = "layers.{}.mixer"
count = 3
kind = "mamba"
conv_shapes = [[128, 4]]
recurrent_shapes = [[8, 16, 64]]
recurrent_dtypes = ["float32"]

[[layers]]
name = "layers.{}.attention"
kind = "full_attention"
num_kv_heads = 2
head_size = 64
"""


def test_a_layer_file_states_layers_without_a_query_side(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.toml"
    file.write_text(LAYER_FILE)
    result = CliRunner().invoke(main, ["plan", str(file), "--cache-memory", "64MiB", "--dtype", "bfloat16", "--json"])
    assert 0 == result.exit_code, result.output
    states, keys = json.loads(result.stdout)["groups"]
    assert ["layers.0.mixer", "layers.1.mixer", "layers.2.mixer"] == states["layers"]
    # 128 x 4 numbers of the model's two bytes, 8 x 16 x 64 of four.
    assert 3 * (128 * 4 * 2 + 8 * 16 * 64 * 4) == states["page_bytes"]
    assert (4, 256) == (states["peak_blocks"], keys["peak_blocks"])


def test_explain_says_that_the_model_computes_them(tmp_path: Path) -> None:
    file = tmp_path / "hybrid.toml"
    file.write_text(LAYER_FILE)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(main, ["explain", str(file)])
    assert 0 == result.exit_code, result.output
    assert "computed by the model" in result.output
    result = CliRunner().invoke(main, ["explain", str(file), "--json"])
    layers = json.loads(result.stdout)["layers"]
    assert [True, True, True, False] == [each["backend"] is None for each in layers]
    assert ("mamba", [], []) == (layers[0]["kind"], layers[0]["wrappers"], layers[0]["others"])
