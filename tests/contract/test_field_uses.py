"""What a wrapper declares about the fields of the metadata, and metadata made as it declares."""

from __future__ import annotations

from typing import ClassVar

import attrs
import pytest
import torch
from kvframe_testing.case import Request
from kvframe_testing.metadata import make_metadata

from kvframe.attention.wrapping import apply_wrapper
from kvframe.contract.errors import WrapperError
from kvframe.contract.hookspecs import API_VERSION
from kvframe.contract.metadata import Axis, CommonAttentionMetadata, Extension
from kvframe.contract.wrapper import FIRST_FIELDS, FieldUse, MetadataWrapper, field_uses


@attrs.frozen(kw_only=True)
class FirstRequest(MetadataWrapper):
    """Keeps the first request, of one token."""

    name: ClassVar[str] = "first_request"
    fields = field_uses(
        reset=("num_reqs", "query_start_loc", "query_start_loc_cpu", "num_actual_tokens"),
        slice=("seq_lens", "seq_lens_cpu", "block_table", "slot_mapping"),
    )
    extensions: ClassVar = {"lengths": FieldUse.SLICE}

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return self.evolve(metadata, **self.given(metadata))

    def given(self, metadata):
        starts, first = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0])
        indices = {"requests": first, "requests_cpu": first, "tokens": first, "tokens_cpu": first}
        return {
            **indices,
            "num_reqs": 1,
            "query_start_loc": starts,
            "query_start_loc_cpu": starts,
            "num_actual_tokens": 1,
        }


@pytest.fixture
def step() -> CommonAttentionMetadata:
    step = make_metadata([Request(5, 1), Request(3, 1, 0)], block_size=2)
    lengths = torch.tensor([7, 8], dtype=torch.int32)
    return attrs.evolve(step, extensions={"lengths": Extension(lengths, Axis.REQUEST, lengths)})


def test_what_is_not_named_is_carried() -> None:
    uses = field_uses(reset=("num_reqs",), slice=("block_table",), reject=("static_shapes",))
    assert (FieldUse.RESET, FieldUse.SLICE, FieldUse.REJECT, FieldUse.CARRY) == tuple(
        uses[name] for name in ("num_reqs", "block_table", "static_shapes", "slot_mapping")
    )
    assert 14 == sum(use is FieldUse.CARRY for use in uses.values())


def test_only_fields_of_the_first_version_are_carried_without_being_named() -> None:
    assert "1.0" == API_VERSION, "FIRST_FIELDS keeps the fields of 1.0; compare it with those of 1.0 alone"
    names = [field.name for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions"]
    assert sorted(names) == sorted(FIRST_FIELDS)
    assert FieldUse.CARRY is field_uses(carry=("later",))["later"]


def test_a_field_of_a_later_version_is_refused_and_not_carried(step: CommonAttentionMetadata) -> None:
    @attrs.frozen(kw_only=True, eq=False)
    class Later(CommonAttentionMetadata):
        later: int = 0

    values = {field.name: getattr(step, field.name) for field in attrs.fields(CommonAttentionMetadata)}
    result = FirstRequest()(Later(**values))
    assert (Later, 0) == (type(result), result.later)  # type: ignore[attr-defined]
    assert "later" not in FirstRequest.fields


def test_a_field_has_one_use() -> None:
    with pytest.raises(WrapperError, match="two uses of the field 'num_reqs'") as caught:
        field_uses(reset=("num_reqs",), carry=("num_reqs",))
    assert "wrong_fields" == caught.value.code


def test_metadata_is_made_as_it_is_declared(step: CommonAttentionMetadata) -> None:
    result = apply_wrapper(FirstRequest(), step)
    assert (1, 1, [6], [6]) == (
        result.num_reqs,
        result.num_actual_tokens,
        result.seq_lens.tolist(),
        result.seq_lens_cpu.tolist(),
    )
    assert step.block_table[:1].tolist() == result.block_table.tolist()
    assert step.slot_mapping[:1].tolist() == result.slot_mapping.tolist()
    assert step.generating_indices is result.generating_indices
    lengths = result.extensions["lengths"]
    assert lengths.values_cpu is not None
    assert [7] == lengths.values.tolist() == lengths.values_cpu.tolist()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("num_reqs", "a value for the field 'num_reqs'"),
        ("requests", "an index of requests for the field 'seq_lens'"),
        ("requests_cpu", "an index of requests for the field 'seq_lens_cpu'"),
        ("tokens", "an index of tokens for the field 'slot_mapping'"),
    ],
)
def test_what_is_missing_is_the_wrappers_mistake(missing: str, message: str, step: CommonAttentionMetadata) -> None:
    class Forgetful(FirstRequest):
        def given(self, metadata):
            return {name: value for name, value in super().given(metadata).items() if name != missing}

    with pytest.raises(WrapperError, match=f"needs {message}; this is a mistake in the wrapper") as caught:
        apply_wrapper(Forgetful(), step)
    assert "failed" == caught.value.code


def test_a_value_that_is_given_is_not_sliced(step: CommonAttentionMetadata) -> None:
    wrapper = FirstRequest()
    table = torch.tensor([[3]], dtype=torch.int32)
    result = wrapper.evolve(step, block_table=table, extensions={}, **wrapper.given(step))
    assert result.block_table is table
    assert {} == dict(result.extensions)


@pytest.mark.parametrize("optional", [True, False])
def test_an_unknown_extension_is_left_out_if_it_is_optional(optional: bool, step: CommonAttentionMetadata) -> None:
    later = Extension(torch.zeros(2), Axis.REQUEST, optional=optional)
    batch = attrs.evolve(step, extensions={**step.extensions, "later": later})
    if optional:
        assert {"lengths"} == {*apply_wrapper(FirstRequest(), batch).extensions}
        assert {"lengths", "later"} == {*batch.extensions}
        return
    with pytest.raises(WrapperError, match="does not know the extension 'later'") as caught:
        apply_wrapper(FirstRequest(), batch)
    assert "unknown_extension" == caught.value.code


def test_a_sliced_extension_stays_optional(step: CommonAttentionMetadata) -> None:
    lengths = attrs.evolve(step.extensions["lengths"], optional=True)
    result = apply_wrapper(FirstRequest(), attrs.evolve(step, extensions={"lengths": lengths}))
    assert result.extensions["lengths"].optional
