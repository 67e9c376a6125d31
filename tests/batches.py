"""Small steps that the tests of batch metadata share."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from hypothesis import strategies as st

from kvframe.attention.metadata import Axis, CommonAttentionMetadata, Extension
from kvframe.attention.step import StepBatch, build_metadata
from kvframe.cache.block_table import BlockTables

BLOCK_SIZE = 4
MAX_MODEL_LEN = 32


@attrs.frozen
class Row:
    """One request of a step; its last ``generating`` new tokens generate."""

    num_computed: int
    query_len: int
    generating: int = 1


Rows = Sequence[Row]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    query_len = draw(st.integers(1, 6))
    return Row(draw(st.integers(0, 2)) * draw(st.integers(1, 9)), query_len, draw(st.integers(0, query_len)))


def step(requests: Rows, table_rows: Sequence[int] | None = None) -> StepBatch:
    """Return a step of these requests; they have extensions that name each request and each of its tokens."""
    table_rows = range(len(requests)) if table_rows is None else table_rows
    query_lens = np.array([row.query_len for row in requests])
    ends = np.cumsum(query_lens)
    generating = [np.arange(end - row.generating, end) for row, end in zip(requests, ends, strict=True)]
    owners = torch.tensor(table_rows, dtype=torch.int32)
    tokens = torch.tensor(
        [100 * owner + i for owner, row in zip(table_rows, requests, strict=True) for i in range(row.query_len)]
    )
    return StepBatch(
        rows=np.array(table_rows),
        num_computed=np.array([row.num_computed for row in requests]),
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
        tables[0].write(row, 0, list(range(1 + row * num_blocks, 1 + (row + 1) * num_blocks)))
    return tables


def metadata_of(requests: Rows, *, device: str = "cpu") -> CommonAttentionMetadata:
    (metadata,) = build_metadata(step(requests), block_tables(len(requests)), torch.device(device))
    return metadata


def padded(metadata: CommonAttentionMetadata, *, num_rows: int, num_tokens: int) -> CommonAttentionMetadata:
    """Add padded rows and tokens, and one padded generating row."""

    def more(values: torch.Tensor, count: int, value: int) -> torch.Tensor:
        return torch.cat([values, torch.full((count, *values.shape[1:]), value, dtype=values.dtype)])

    starts, generating = metadata.query_start_loc_cpu, metadata.generating_indices_cpu
    starts, seq_lens = more(starts, num_rows, int(starts[-1])), more(metadata.seq_lens_cpu, num_rows, 0)
    generating = more(generating, 1, int(generating[-1]))
    count = {Axis.REQUEST: num_rows, Axis.TOKEN: num_tokens, Axis.STEP: 0}
    return attrs.evolve(
        metadata,
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=seq_lens.clone(),
        seq_lens_cpu=seq_lens,
        num_reqs=metadata.num_reqs + num_rows,
        block_table=more(metadata.block_table, num_rows, 0),
        slot_mapping=more(metadata.slot_mapping, num_tokens, 0),
        generating_indices=generating.clone(),
        generating_indices_cpu=generating,
        extensions={
            name: Extension(
                more(extension.values, count[extension.axis], -1),
                extension.axis,
                None if extension.values_cpu is None else more(extension.values_cpu, count[extension.axis], -1),
            )
            for name, extension in metadata.extensions.items()
        },
    )


def device_tensors(metadata: CommonAttentionMetadata) -> dict[str, torch.Tensor]:
    """Return the fields that lie on the device, and the extensions' values, by name."""
    fields = attrs.asdict(metadata, recurse=False)
    tensors = {name: value for name, value in fields.items() if torch.is_tensor(value) and not name.endswith("_cpu")}
    return tensors | {name: extension.values for name, extension in metadata.extensions.items()}


def assert_equal(expected: CommonAttentionMetadata, actual: CommonAttentionMetadata) -> None:
    """Hold every field and extension equal, dtypes included; a block table may be wider than expected."""
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
