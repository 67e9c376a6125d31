"""The conformance kit for wrappers: right ones pass, and each kind of bug is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from kvframe_testing.batches import wrapper_batches
from kvframe_testing.case import Request
from kvframe_testing.laws import ConformanceError
from kvframe_testing.metadata import find_problem, make_metadata, on_device
from kvframe_testing.wrappers import check_wrapper
from kvframe_testing.writes import WriteGuard

from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import WrapperError
from kvframe.contract.metadata import (
    Axis,
    CommonAttentionMetadata,
    Extension,
)
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from tests.cache.plans import full

LAYER = LayerSpec(name="layer", spec=full())
CARRIED = {field.name: FieldUse.CARRY for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions"}


@attrs.frozen(kw_only=True)
class Nothing(MetadataWrapper):
    """Returns its input; each bug below is one change of it."""

    name: ClassVar[str] = "nothing"
    fields: ClassVar[Mapping[str, FieldUse]] = CARRIED
    extensions: ClassVar[Mapping[str, FieldUse]] = {
        "notes": FieldUse.CARRY,
        "lengths": FieldUse.RESET,
        "labels": FieldUse.SLICE,
    }
    capture: ClassVar[GraphCapture] = GraphCapture.ALWAYS

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(metadata, extensions=self.pass_extensions(metadata))


def doing(change: Callable[[CommonAttentionMetadata], Any], **declared: Any) -> MetadataWrapper:
    """Return ``Nothing`` with one change: fields that it sets, or a side effect if the function returns None."""

    def call(self: Nothing, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(Nothing.__call__(self, metadata), **(change(metadata) or {}))

    wrapper: MetadataWrapper = type("Changed", (Nothing,), {"__call__": call, **declared})()
    return wrapper


def resetting(*names: str) -> dict[str, FieldUse]:
    return {**CARRIED, **dict.fromkeys(names, FieldUse.RESET)}


def test_a_wrapper_that_keeps_the_contract_passes() -> None:
    check_wrapper(Nothing(), LAYER)
    check_wrapper(doing(lambda metadata: {"causal": False}, fields=resetting("causal")), LAYER)


# --- bugs -------------------------------------------------------------------------------------------------------------


def count_up(metadata: CommonAttentionMetadata) -> None:
    metadata.seq_lens.add_(1)


def count_up_on_the_host(metadata: CommonAttentionMetadata) -> None:
    metadata.seq_lens_cpu.numpy()[:] += 1


def write_what_is_there(metadata: CommonAttentionMetadata) -> None:
    metadata.block_table[1:].mul_(1)


def refuse(metadata: CommonAttentionMetadata) -> None:
    raise WrapperError("not today", code="not_today")


def longest_on_the_device(metadata: CommonAttentionMetadata) -> dict[str, Any]:
    return {"max_seq_len": int(metadata.seq_lens.max())}


def loop_over_requests(metadata: CommonAttentionMetadata) -> None:
    assert all(length >= 0 for length in metadata.seq_lens_cpu.tolist())


def fresh_number(metadata: CommonAttentionMetadata) -> dict[str, Any]:
    return {"block_table": torch.full_like(metadata.block_table, next(NUMBERS))}


NUMBERS = iter(range(1, 10**6))


def one_extension(name: str) -> Callable[[CommonAttentionMetadata], dict[str, Any]]:
    extension = Extension(torch.zeros(1, dtype=torch.int32), Axis.STEP)
    return lambda metadata: {"extensions": {**passed(metadata), name: extension}}


def without(name: str) -> Callable[[CommonAttentionMetadata], dict[str, Any]]:
    return lambda metadata: {"extensions": {key: value for key, value in passed(metadata).items() if key != name}}


def passed(metadata: CommonAttentionMetadata) -> Mapping[str, Extension]:
    return Nothing().pass_extensions(metadata)


def narrow_table(metadata: CommonAttentionMetadata) -> dict[str, Any]:
    max_seq_len = int(metadata.seq_lens_cpu.numpy().max())
    num_blocks = -(-max_seq_len // metadata.block_size)
    return {"block_table": metadata.block_table[:, :num_blocks].clone(), "max_seq_len": max_seq_len}


def exact_max_query_len(metadata: CommonAttentionMetadata) -> dict[str, Any]:
    return {"max_query_len": int(np.diff(metadata.query_start_loc_cpu.numpy()).max())}


MISTAKES = {
    "a field that is not declared": (
        doing(lambda metadata: None, fields={name: use for name, use in CARRIED.items() if name != "causal"}),
        r"its class: it does not declare \['causal'\]",
    ),
    "a field that there is none of": (
        doing(lambda metadata: None, fields={**CARRIED, "logits": FieldUse.CARRY}),
        r"it declares \['logits'\], which the metadata lacks",
    ),
    "a copy of what it declares to carry": (
        doing(lambda metadata: {"seq_lens": metadata.seq_lens.clone()}),
        "declares to carry seq_lens and returns another",
    ),
    "another number than it declares to carry": (
        doing(lambda metadata: {"causal": False}),
        "declares to carry causal and returns another",
    ),
    "a write to the batch": (doing(count_up), "it writes to its input: seq_lens"),
    "a write to its host copy": (doing(count_up_on_the_host), "it writes to its input: seq_lens_cpu"),
    "a write that leaves all as it is": (doing(write_what_is_there), "it writes to its input: block_table"),
    "a wait for the device": (
        doing(longest_on_the_device, fields=resetting("max_seq_len")),
        "decode: it waits for a value of the device, .*: Tensor.item",
    ),
    "a loop over requests": (doing(loop_over_requests), "256 requests: it loops over requests in Python"),
    "another result each time": (
        doing(fresh_number, fields=resetting("block_table")),
        "it gives two results for one input: block_table",
    ),
    "a lost extension": (doing(without("labels")), "lost the extension 'labels'"),
    "an extension that is not declared": (
        doing(one_extension("more")),
        r"it adds the extensions \['more'\] and does not declare them",
    ),
    "another extension than it declares to carry": (
        doing(one_extension("notes")),
        "declares to carry the extension 'notes' and returns another",
    ),
    "an extension that it declares to reset": (
        doing(lambda metadata: {"extensions": metadata.extensions}),
        "declares to reset the extension 'lengths' and returns it unchanged",
    ),
    "shapes that follow from the batch": (
        doing(narrow_table, fields=resetting("block_table", "max_seq_len")),
        "at a graph's sizes: shapes differ from those of decode: block_table",
    ),
    "a limit that follows from the batch": (
        doing(exact_max_query_len, fields=resetting("max_query_len")),
        "at a graph's sizes: shapes differ from those of decode: max_query_len",
    ),
    "metadata that contradicts itself": (
        doing(lambda metadata: {"max_seq_len": 1}, fields=resetting("max_seq_len")),
        "wrong values: max_seq_len is 1, the longest request has 15 tokens",
    ),
    "parts that do not fit together": (
        doing(lambda metadata: {"seq_lens": metadata.seq_lens.long()}, fields=resetting("seq_lens")),
        "does not fit together: seq_lens has the dtype torch.int64, not torch.int32",
    ),
    "a host copy that says something else": (
        doing(lambda metadata: {"seq_lens": metadata.seq_lens - 1}, fields=resetting("seq_lens")),
        "seq_lens is not what seq_lens_cpu says",
    ),
    "a refusal of everything": (doing(refuse), "any batch: it refuses all of them"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake: str) -> None:
    wrapper, message = MISTAKES[mistake]
    with pytest.raises(ConformanceError, match=message):
        check_wrapper(wrapper, LAYER)


def test_shapes_may_follow_from_the_batch_where_nothing_is_captured() -> None:
    reset = resetting("block_table", "max_query_len", "max_seq_len")
    for change in (narrow_table, exact_max_query_len):
        check_wrapper(doing(change, fields=reset, capture=GraphCapture.NEVER), LAYER)


def test_a_level_of_capture_is_held_to_its_own_batches_only() -> None:
    wrapper = doing(exact_max_query_len, fields=resetting("max_query_len"), capture=GraphCapture.UNIFORM)
    check_wrapper(wrapper, LAYER)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_metadata_says_where_each_token_goes() -> None:
    metadata = make_metadata([Request(3, 2, 0), Request(2, 0, 0), Request(0, 3, 2)], block_size=4)
    assert [0, 2, 2, 5] == metadata.query_start_loc.tolist()
    assert [5, 2, 3] == metadata.seq_lens.tolist()
    assert [[1, 2], [3, 4], [5, 6]] == metadata.block_table.tolist()
    assert [7, 8, 20, 21, 22] == metadata.slot_mapping.tolist()
    assert [3, 4] == metadata.generating_indices.tolist()


def test_where_nothing_generates_one_row_is_padding() -> None:
    metadata = make_metadata([Request(0, 3, 0)], block_size=4)
    assert (0, [2]) == (metadata.num_generating, metadata.generating_indices.tolist())


@pytest.mark.parametrize("name", wrapper_batches(4))
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_no_batch_contradicts_itself(name: str, block_size: int) -> None:
    assert "" == find_problem(make_metadata(wrapper_batches(block_size)[name], block_size))


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_reqs": 3}, "query_start_loc has the shape [3], not [4]"),
        ({"num_reqs": True}, "num_reqs is True, not an int"),
        ({"causal": 1}, "causal is 1, not a bool"),
        ({"slot_mapping": [0, 1]}, "slot_mapping is an object of the type 'list', not a tensor of one dimension"),
        ({"seq_lens": None}, "seq_lens is an object of the type 'NoneType', not a tensor"),
        ({"seq_lens": torch.tensor([5, 5])}, "seq_lens has the dtype torch.int64, not torch.int32"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")}, "seq_lens lies on meta, not on cpu"),
        ({"block_table": int32([1, 2])}, "block_table has the shape [2], not [2, max_blocks]"),
        (
            {"extensions": {"labels": Extension(torch.zeros(3), Axis.REQUEST)}},
            "the extension 'labels' has the shape [3], not [2, …]",
        ),
        (
            {"extensions": {"labels": Extension(torch.zeros(2), Axis.REQUEST, torch.zeros(3))}},
            "the host copy of the extension 'labels' has the shape [3], not [2]",
        ),
        ({"query_start_loc_cpu": int32([1, 3, 4])}, "query_start_loc starts at 1, not at 0"),
        ({"seq_lens": int32([5, 6])}, "seq_lens is not what seq_lens_cpu says"),
    ],
)
def test_metadata_that_contradicts_itself_is_found(change: dict[str, Any], problem: str) -> None:
    metadata = make_metadata([Request(2, 3), Request(4, 1)], block_size=4)
    assert problem == find_problem(attrs.evolve(metadata, **change))


# --- stand-ins for a device's tensors ---------------------------------------------------------------------------------


HOST = torch.tensor([2, 0, 1])
WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda tensor: tensor[0].item(),
    "cpu": lambda tensor: tensor.cpu(),
    "to cpu": lambda tensor: tensor.to("cpu"),
    "tolist": lambda tensor: tensor.tolist(),
    "numpy": lambda tensor: tensor.numpy(),
    "array": lambda tensor: np.asarray(tensor),
    "bool": lambda tensor: bool(tensor[0]),
    "int": lambda tensor: int(tensor[0]),
    "float": lambda tensor: float(tensor[0]),
    "range": lambda tensor: range(tensor[0]),
    "nonzero": lambda tensor: tensor.nonzero(),
    "where": lambda tensor: torch.where(tensor),
    "mask": lambda tensor: tensor[tensor > 1],
    "slice": lambda tensor: tensor[: tensor[0]],
    "slice of a host tensor": lambda tensor: HOST[: tensor[0]],
    "repeat_interleave": lambda tensor: torch.repeat_interleave(HOST, tensor),
    "comparison": lambda tensor: torch.equal(tensor, HOST),
    "a result's": lambda tensor: tensor.cumsum(0).max().item(),
    "a size": lambda tensor: torch.arange(tensor[0]),
}
WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda tensor: tensor.add_(1),
    "copy_": lambda tensor: tensor.copy_(HOST),
    "index_put_": lambda tensor: tensor.index_put_((HOST,), HOST),
    "setitem": lambda tensor: tensor.__setitem__(0, 1),
    "iadd": lambda tensor: tensor.__iadd__(1),
    "out": lambda tensor: torch.add(HOST, 1, out=tensor),
    "view": lambda tensor: tensor.view(3, 1)[1:].zero_(),
    "detached": lambda tensor: tensor.detach().zero_(),
    "data": lambda tensor: tensor.data.zero_(),
    "of numpy": lambda tensor: tensor.numpy().fill(0),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_for_a_value_of_the_device_raises(name: str) -> None:
    with pytest.raises((RuntimeError, TypeError)):
        WAITS[name](on_device(metadata_with(HOST)).slot_mapping)


def metadata_with(slots: torch.Tensor) -> CommonAttentionMetadata:
    return attrs.evolve(make_metadata([Request(0, 3)], block_size=4), slot_mapping=slots)


@pytest.mark.parametrize("name", WRITES)
def test_a_write_is_found_even_of_what_is_there(name: str) -> None:
    tensor = HOST.clone()
    guard = WriteGuard([tensor])
    guard.check("nothing was written")
    WRITES[name](tensor)
    with pytest.raises(ConformanceError, match="it wrote"):
        guard.check("it wrote")


def test_host_tensors_keep_their_values() -> None:
    metadata = on_device(make_metadata([Request(0, 3)], block_size=4))
    assert [3] == metadata.seq_lens_cpu.tolist()
    assert metadata.seq_lens.is_meta
