"""Wrong metadata of a wrapper is refused before a kernel trusts it: no such wrapper ends the process."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import pytest
import torch
from kvframe_testing.case import Request
from kvframe_testing.metadata import make_metadata, on_device

from kvframe.attention.wrapping import WrapperCall
from kvframe.contract.errors import WrapperError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.loading.plugins import load_plugins
from tests.models.serving import GREEDY, PROMPTS, TinyModel
from tests.programs import run_program
from tests.support.plugins import plugin
from tests.testing.wrong_wrappers import WRONG, Change, Wrong, bench_of, end_of, longer

NUM_RANDOM = 150


@pytest.mark.parametrize("backend", ["torch", "cpu", pytest.param("numba", marks=pytest.mark.whole)])
def test_no_wrong_wrapper_ends_the_process(backend: str) -> None:
    if backend != "torch":
        pytest.importorskip(f"kvframe_{backend}")
    # In a separate process, because a kernel could end it.
    run = run_program("-m", "tests.testing.wrong_wrappers", backend, str(NUM_RANDOM))
    assert 0 == run.returncode, run.stderr
    outcomes = json.loads(run.stdout)
    assert "right" == outcomes["none"]
    for name, (_, message) in WRONG.items():
        for end in outcomes["named"][name]:
            assert end.startswith(("wrong_value: wrapper 'wrong', of the layer 'a',", "wrong_shape: wrapper 'wrong'"))
            assert message in end
    ends = outcomes["random"]
    assert {"refused", "right", "other"} >= set(ends)
    assert 2 * NUM_RANDOM == sum(ends.values())
    assert min(ends["refused"], ends["right"]) > 0


def test_the_requests_of_the_step_fail_and_the_engine_goes_on(tmp_path: Path) -> None:
    model = TinyModel.save(tmp_path, "llama")
    model = attrs.evolve(model, registry=load_plugins(plugins=[plugin("mine", wrappers={"wrong": Wrong})]).registry)
    Wrong.change = staticmethod(lambda metadata: {})
    with model.engine(wrappers=["wrong"]) as engine:
        (expected,) = engine.generate([PROMPTS[1]], GREEDY)
        Wrong.change = staticmethod(longer)
        engine.add_request(PROMPTS[1], GREEDY)
        with pytest.raises(WrapperError, match=r"wrapper .wrong., of the layer .* and 2 others, gives wrong values"):
            engine.step()
        (failed,) = engine.step()
        assert "error" == failed.finish_reason
        Wrong.change = staticmethod(lambda metadata: {})
        (output,) = engine.generate([PROMPTS[1]], GREEDY)
        assert expected.token_ids == output.token_ids


# --- found by the audit only ------------------------------------------------------------------------------------------


def swapped(metadata: CommonAttentionMetadata) -> dict[str, torch.Tensor]:
    """Give each request a block of the pool that no request of the step holds."""
    return {"block_table": metadata.block_table.clone().fill_(1000)}


def test_blocks_of_other_requests_are_found_by_an_audit() -> None:
    assert "other" == end_of(bench_of("torch"), swapped)
    assert "block_table names 1000, which is none of those" in end_of(bench_of("torch", audit=True), swapped)


def test_a_write_to_the_input_is_found_by_an_audit() -> None:
    def write(metadata: CommonAttentionMetadata) -> dict[str, torch.Tensor]:
        metadata.block_table[0, 0] = 2
        return {}

    assert "gives wrong values: it writes to block_table of its input" in end_of(bench_of("torch", audit=True), write)


def test_an_audit_takes_right_metadata_for_right() -> None:
    assert "right" == end_of(bench_of("torch", audit=True), lambda metadata: {"block_table": metadata.block_table + 0})


def on_a_device(change: Change) -> tuple[WrapperCall, CommonAttentionMetadata]:
    """Return a wrapper, and a step in place of one with tensors on a device."""
    Wrong.change = staticmethod(change)
    return WrapperCall(Wrong(), ["a", "b"], torch.empty(100, 0)), on_device(
        make_metadata([Request(9, 2)], block_size=4)
    )


def test_what_lies_on_a_device_is_not_asked_for_unless_there_is_an_audit() -> None:
    call, metadata = on_a_device(lambda metadata: {"block_table": metadata.block_table + 1000})
    assert metadata.slot_mapping is call(metadata).slot_mapping


def test_what_the_host_knows_is_checked_of_a_device_too() -> None:
    call, metadata = on_a_device(longer)
    with pytest.raises(WrapperError, match="'wrong', of the layer 'a' and 1 others, gives wrong values: seq_lens"):
        call(metadata)


def test_a_wrapper_that_returns_no_metadata_is_named() -> None:
    class Nothing(Wrong):
        def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
            return None  # type: ignore[return-value]

    with pytest.raises(WrapperError, match="wrapper 'wrong' returns 'NoneType', not metadata") as refused:
        WrapperCall(Nothing(), [])(make_metadata([Request(9, 2)], block_size=4))
    assert "wrong_shape" == refused.value.code


def test_the_pages_that_there_are_are_those_of_a_cache_that_was_resized() -> None:
    pages = torch.empty(100, 0)
    Wrong.change = staticmethod(lambda metadata: {"block_table": metadata.block_table + 50})
    call, metadata = WrapperCall(Wrong(), ["a"], pages), make_metadata([Request(9, 2)], block_size=4)
    assert 51 == call(metadata).block_table[0, 0]
    pages.resize_(50, 0)
    with pytest.raises(WrapperError, match="block_table names 53, and there are 50 in all"):
        call(metadata)
