"""Small steps for the tests of batch metadata."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from hypothesis import strategies as st
from kvframe_testing.case import Request

from kvframe.attention.batch_metadata import StepBatch, build_metadata
from kvframe.attention.padding import pad_metadata
from kvframe.cache.block_table import BlockTables
from kvframe.contract.metadata import Axis, CommonAttentionMetadata, Extension

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32


Requests = Sequence[Request]


@st.composite
def any_request(draw: st.DrawFn) -> Request:
    num_new = draw(st.integers(1, 6))
    return Request(draw(st.integers(0, 2)) * draw(st.integers(1, 9)), num_new, draw(st.integers(0, num_new)))


def step(requests: Requests, table_rows: Sequence[int] | None = None) -> StepBatch:
    """Return a step of these requests, with extensions whose values identify each request and each token."""
    table_rows = range(len(requests)) if table_rows is None else table_rows
    query_lens = np.array([request.num_new for request in requests])
    ends = np.cumsum(query_lens)
    generating = [np.arange(end - request.num_generating, end) for request, end in zip(requests, ends, strict=True)]
    owners = torch.tensor(table_rows, dtype=torch.int32)
    tokens = torch.tensor(
        [100 * row + i for row, request in zip(table_rows, requests, strict=True) for i in range(request.num_new)]
    )
    return StepBatch(
        rows=np.array(table_rows),
        num_computed=np.array([request.num_computed for request in requests]),
        query_lens=query_lens,
        generating_indices=np.concatenate(generating),
        extensions={
            "owners": Extension(owners, Axis.REQUEST, owners.clone()),
            "names": Extension(tokens, Axis.TOKEN),
            "seed": Extension(torch.tensor([7]), Axis.STEP),
        },
    )


def block_tables(num_rows: int) -> BlockTables:
    """Return one table in which no two rows share a block."""
    tables = BlockTables(num_rows, MAX_MODEL_LEN, [BLOCK_SIZE])
    num_blocks = MAX_MODEL_LEN // BLOCK_SIZE
    for row in range(num_rows):
        tables[0].ids[row, :num_blocks] = range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)
    return tables


def metadata_of(requests: Requests, *, device: str = "cpu") -> CommonAttentionMetadata:
    (metadata,) = build_metadata(step(requests), block_tables(len(requests)), torch.device(device))
    return metadata


def padded(metadata: CommonAttentionMetadata, *, num_reqs: int, num_tokens: int) -> CommonAttentionMetadata:
    """Add padded requests and tokens, and one padded generating row, to a step without padding."""
    static = pad_metadata(
        metadata,
        num_reqs=metadata.num_reqs + num_reqs,
        num_tokens=metadata.num_actual_tokens + num_tokens,
        num_generating=len(metadata.generating_indices) + 1,
        max_query_len=metadata.max_query_len,
    )
    return attrs.evolve(static, static_shapes=False)


def device_tensors(metadata: CommonAttentionMetadata) -> dict[str, torch.Tensor]:
    """Return the fields on the device, and the extensions' values, by name."""
    fields = attrs.asdict(metadata, recurse=False)
    tensors = {name: value for name, value in fields.items() if torch.is_tensor(value) and not name.endswith("_cpu")}
    return tensors | {name: extension.values for name, extension in metadata.extensions.items()}


def assert_equal(expected: CommonAttentionMetadata, actual: CommonAttentionMetadata) -> None:
    """Assert that every field and extension is equal, dtypes included; a block table may be wider than expected."""
    for field in attrs.fields(CommonAttentionMetadata):
        want, got = getattr(expected, field.name), getattr(actual, field.name)
        if field.name == "extensions":
            assert {name: extension.axis for name, extension in want.items()} == {
                name: extension.axis for name, extension in got.items()
            }
            for name in want:
                _assert_same(want[name].values, got[name].values)
                _assert_same(want[name].values_cpu, got[name].values_cpu)
        elif field.name == "block_table":
            _assert_same(want, got[:, : want.shape[1]])
        else:
            _assert_same(want, got)


def _assert_same(want: object, got: object) -> None:
    if isinstance(want, torch.Tensor):
        assert isinstance(got, torch.Tensor)
        assert (want.dtype, want.tolist()) == (got.dtype, got.tolist())
    else:
        assert want == got
