"""The table of an engine's requests: how long they stay, and which are reported."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from kvframe_engine.requests.progress import RequestTable
from kvframe_engine.requests.request import Request, SamplingParams


def request(request_id: str) -> Request:
    return Request.create(request_id, [1, 2], SamplingParams(), eos_token_ids=frozenset(), max_model_len=8)


def table_of(*request_ids: str) -> RequestTable:
    table = RequestTable()
    for request_id in request_ids:
        table.add(request(request_id))
    return table


def test_a_fresh_id_is_one_that_no_request_has() -> None:
    table = table_of("req-0", "req-2")
    assert ["req-1", "req-3"] == [table.fresh_id(), table.fresh_id()]


def test_the_request_that_has_been_unreported_for_longest_is_the_first() -> None:
    table = table_of("a", "b")
    table.note([table["b"], table["a"]])
    table.note([table["b"]])
    assert ["b", "a"] == list(table.unreported)


def test_a_request_stays_until_its_end_is_reported() -> None:
    table = table_of("a")
    table.note([table["a"]])
    table.mark_reported(table["a"])
    assert (["a"], {}) == (list(table), table.unreported)
    table["a"].finish_reason = "aborted"
    table.mark_reported(table["a"])
    assert [] == list(table)


def test_a_request_that_was_removed_is_not_reported() -> None:
    table = table_of("a")
    table.note([table["a"]])
    assert table.remove("a") is not None
    assert {} == table.unreported
    assert table.remove("a") is None


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["add", "end", "report", "remove"]))))
def test_all_unreported_requests_are_in_the_table(actions: list[tuple[str, str]]) -> None:
    table = RequestTable()
    for request_id, action in actions:
        if action == "remove":
            table.remove(request_id)
        elif request_id not in table:
            table.add(request(request_id))
        elif action == "report":
            table.mark_reported(table[request_id])
        else:
            table[request_id].finish_reason = "stop" if action == "end" else None
            table.note([table[request_id]])
        assert table.unreported.items() <= table.items()
