"""Runs wrappers with wrong metadata as in an engine; a program, because a kernel that trusts them ends the process.

    python -m tests.testing.wrong_wrappers BACKEND NUM_RANDOM

prints one line of JSON: the outcome of each bug by name, and how often random bugs had each outcome.
"""

from __future__ import annotations

import collections
import json
import random
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import torch

from kvframe.attention.wrapping import MISTAKES as MISTAKE_CODES
from kvframe.config.stack import Stack
from kvframe.contract.errors import WrapperError
from kvframe.contract.metadata import SEQ_STARTS, Axis, CommonAttentionMetadata, Extension
from kvframe.contract.wrapper import FieldUse, MetadataWrapper
from tests.attention.attending import MIXED, Bench, full, layer
from tests.support.plugins import plugin

Change = Callable[[CommonAttentionMetadata], Mapping[str, Any]]
NAMES = tuple(field.name for field in attrs.fields(CommonAttentionMetadata) if field.name != "extensions")


def both(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of a tensor and of its host copy."""
    return lambda metadata: {field: change(getattr(metadata, field)) for field in (name, f"{name}_cpu")}


def one(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Return a change of one tensor only."""
    return lambda metadata: {name: change(getattr(metadata, name))}


def longer(metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
    """Make all requests longer, consistently in all fields."""
    return {**both("seq_lens", lambda lens: lens + 1000)(metadata), "max_seq_len": metadata.max_seq_len + 1000}


def hide_all(metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
    """Make requests start after their ends."""
    starts = metadata.seq_lens_cpu + 1000
    return {"extensions": {SEQ_STARTS: Extension(starts, Axis.REQUEST, starts)}}


WRONG: dict[str, tuple[Change, str]] = {
    "lengths beyond the block table": (longer, "seq_lens of request 3 is 1021"),
    "lengths on the device only": (one("seq_lens", lambda lens: lens + 1000), "seq_lens is not what seq_lens_cpu says"),
    "lengths below 0": (both("seq_lens", lambda lens: lens - 100), "seq_lens of request 1 is -95"),
    "lengths below those of the queries": (both("seq_lens", torch.zeros_like), "new tokens, and seq_lens of it is 0"),
    "starts that fall": (both("query_start_loc", lambda starts: starts[[0, 3, 2, 1, 4]]), "query_start_loc falls"),
    "starts that are turned around": (both("query_start_loc", lambda starts: starts.flip(0)), "starts at 48, not at 0"),
    "starts beyond the tokens": (both("query_start_loc", lambda starts: starts * 1000), "ends at 48000"),
    "blocks beyond the pool": (one("block_table", lambda table: table + 10**8), "block_table names 1000000"),
    "blocks below 0": (one("block_table", lambda table: table - 10**6), "block_table names -"),
    "slots beyond the pool": (one("slot_mapping", lambda slots: slots + 10**9), "slot_mapping names 10000000"),
    "another dtype": (both("seq_lens", lambda lens: lens.long()), "seq_lens has the dtype torch.int64"),
    "a generating token beyond the step": (both("generating_indices", lambda rows: rows + 1000), "names tokens from"),
    "a limit that is too low": (lambda metadata: {"max_seq_len": 1}, "max_seq_len is 1"),
    "a limit that no memory holds": (lambda metadata: {"max_query_len": 10**12}, "max_query_len is 1000000000000"),
    "another block size": (lambda metadata: {"block_size": 1024}, "block_size is 1024"),
    "a start after the end": (hide_all, "the extension 'seq_starts' does not lie"),
}
"""Changes of right metadata, with the expected errors."""


@attrs.frozen(kw_only=True)
class Wrong(MetadataWrapper):
    """Applies the current change to the metadata."""

    name: ClassVar[str] = "wrong"
    fields: ClassVar[Mapping[str, FieldUse]] = dict.fromkeys(NAMES, FieldUse.RESET)
    change: ClassVar[Change] = staticmethod(lambda metadata: {})

    def __call__(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return attrs.evolve(metadata, **type(self).change(metadata))


def bench_of(backend: str, *, audit: bool = False) -> Bench:
    """Return a layer on a backend, after the wrapper."""
    rules = [{"layers": "*", "backend": backend, "wrappers": ["wrong"]}]
    stack = Stack.from_mapping({"cache": {"audit": audit}, "rules": rules})
    return Bench([layer("a", full())], stack, [plugin("mine", wrappers={"wrong": Wrong})])


def random_change(random_numbers: random.Random) -> Change:
    """Return a change of one or two fields to random values."""
    changes = [_random_field(random_numbers) for _ in range(random_numbers.choice([1, 1, 2]))]
    return lambda metadata: {name: value for change in changes for name, value in change(metadata).items()}


def _random_field(random_numbers: random.Random) -> Change:
    name = random_numbers.choice(NAMES)
    value = random_numbers.choice([-(2**31), -1000, -1, 0, 1, 2, 3, 5, 7, 12, 24, 100, 1000, 10**6, 2**31 - 1])
    place, kind = random_numbers.random(), random_numbers.randrange(8)

    def change_tensor(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        flat = changed.view(-1)
        if kind < 4:
            flat[int(place * len(flat))] = value
            return changed
        others = (changed + value, changed.flip(0), changed[: int(place * len(changed))], changed.double())
        return others[kind - 4]

    def change(metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        if not isinstance(getattr(metadata, name), torch.Tensor):
            return {name: [value, value, value, bool(value), float(value), None, str(value), 10**18][kind]}
        copied = name.removesuffix("_cpu")
        if copied in ("query_start_loc", "seq_lens", "generating_indices") and place < 0.8:
            return both(copied, change_tensor)(metadata)
        return one(name, change_tensor)(metadata)

    return change


def end_of(bench: Bench, change: Change) -> str:
    """Return the code and the sentence of the refusal, or the layer's output."""
    Wrong.change = staticmethod(change)
    try:
        output = bench.run(MIXED)["a"]
    except WrapperError as error:
        return f"{error.code}: {error}"
    if output.shape != (20, 2, 4):
        return f"an output {list(output.shape)}"
    right = torch.allclose(output, bench.dense(bench.layers[0], MIXED), rtol=1e-4, atol=1e-5)
    return "right" if right else "other"


def main() -> None:
    """Run every bug by name, then random ones, with the audit and without."""
    backend, num_random = sys.argv[1], int(sys.argv[2])
    benches = [bench_of(backend, audit=audit) for audit in (False, True)]
    ends_by_bug = {name: [end_of(bench, change) for bench in benches] for name, (change, _) in WRONG.items()}
    numbers = random.Random(0)
    ends: collections.Counter[str] = collections.Counter()
    for _ in range(num_random):
        change = random_change(numbers)
        for bench in benches:
            end = end_of(bench, change).split(":")[0]
            ends["refused" if end in MISTAKE_CODES else end] += 1
    print(json.dumps({"none": end_of(benches[0], lambda metadata: {}), "named": ends_by_bug, "random": ends}))


if __name__ == "__main__":
    main()
