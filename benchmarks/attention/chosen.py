"""Measure a decode step's attention over chosen tokens beside that over all. See benchmarks/README.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import click
import torch
from kvframe_mla import MLASpec

from benchmarks.harness import options
from benchmarks.harness.layers import page_views
from benchmarks.harness.pages import heading, medians, page, spread, table
from benchmarks.harness.process import timed
from benchmarks.harness.record import benchmark, by_turns, counted, ratios
from kvframe import FullAttentionSpec, Stack, load_plugins
from kvframe.contract import (
    AttentionBackend,
    ChosenTokens,
    CommonAttentionMetadata,
    KVCache,
    KVCacheSpec,
    LayerSpec,
    MoreInputs,
    QuerySpec,
)
from kvframe.selection.select import select_backends

CPU = torch.device("cpu")
BLOCK_SIZE = 16
INDEX_HEADS, INDEX_SIZE = 64, 128
"""The sizes of DeepSeek V3.2's indexer."""

SHAPES: Mapping[str, tuple[type[KVCacheSpec], dict[str, int], dict[str, Any]]] = {
    "keys": (FullAttentionSpec, {"num_kv_heads": 8, "head_size": 128}, {"num_heads": 32, "head_size": 128}),
    "latents": (
        MLASpec,
        {"latent_size": 512, "rope_size": 64, "head_size_v": 128},
        {"num_heads": 16, "head_size": 192},
    ),
}
"""Keys and values of Llama 3.1 8B's shape, and latents of DeepSeek's with fewer heads."""

BACKENDS = {"keys": ("cpu", "torch"), "latents": ("mla",)}


def calls(shape: str, backend: str, num_tokens: int, num_chosen: int) -> dict[str, Callable[[], Any]]:
    """Return calls of one decode step: over all tokens, over chosen ones, and the scores of an indexer."""
    spec_class, sizes, query_sizes = SHAPES[shape]
    spec = spec_class(block_size=BLOCK_SIZE, **sizes)
    num_blocks = num_tokens // BLOCK_SIZE
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty((1 + num_blocks) * spec.block_bytes // 4).uniform_(-1, 1, generator=generator)
    views = page_views(spec, pool.view(torch.uint8))
    order = 1 + torch.randperm(num_blocks, generator=generator).int()
    starts, lens = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([num_tokens], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        seq_lens_cpu=lens,
        num_reqs=1,
        num_actual_tokens=1,
        max_query_len=1,
        max_seq_len=num_tokens,
        block_table=order[None],
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        num_generating=1,
    )
    query = torch.randn(1, query_sizes["num_heads"], query_sizes["head_size"], generator=generator)
    token_indices = torch.randperm(num_tokens, generator=generator)[:num_chosen].int().view(1, 1, -1)
    calls_by_name: dict[str, Callable[[], Any]] = {}
    for name, choice in (("all", None), ("chosen", {"max_chosen": num_chosen})):
        side = QuerySpec(scale=query_sizes["head_size"] ** -0.5, choice=choice, **query_sizes)
        layer = LayerSpec(name="layer", spec=spec, query=side)
        stack = Stack.from_mapping({"rules": [{"layers": "*", "backend": backend}]})
        (selected,) = select_backends([layer], stack, load_plugins().registry, "cpu")
        instance = selected.backend_class([layer], CPU)
        needed = spec.parameters(side)
        instance.bind(layer, {key: torch.randn(size, generator=generator) * 0.05 for key, size in needed.items()})
        calls_by_name[name] = partial(_attend, instance, layer, query, views, step, token_indices if choice else None)
    keys = torch.randn(num_tokens, INDEX_SIZE, generator=generator)
    index_query = torch.randn(INDEX_HEADS, INDEX_SIZE, generator=generator)
    weights = torch.randn(INDEX_HEADS, generator=generator)
    calls_by_name["scores"] = lambda: (weights @ torch.relu(index_query @ keys.T)).topk(num_chosen).indices
    return calls_by_name


def _attend(
    backend: AttentionBackend,
    layer: LayerSpec,
    query: torch.Tensor,
    views: KVCache,
    step: CommonAttentionMetadata,
    token_indices: torch.Tensor | None,
) -> torch.Tensor:
    """Build a step's metadata, and attend to all tokens or to the chosen ones."""
    builder = backend.make_builder()
    built = builder.finish(builder.build(step))
    if token_indices is None:
        return backend.attend(layer, query, views, built)
    return backend.attend(layer, query, views, built, more=MoreInputs(chosen=ChosenTokens(token_indices)))


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of a record."""
    rows = [
        [
            row["shape"],
            row["backend"],
            *(spread(row[name], "{:,.2f}", scale=1000) for name in ("all", "chosen", "scores")),
            spread(ratios(row["all"], row["chosen"]), "{:.1f}"),
        ]
        for row in record["rows"]
    ]
    columns = ["state", "backend", "all, ms", "chosen, ms", "scores of an indexer, ms", "times as fast"]
    text = (
        f"One decode step of one request of {record['num_tokens']:,} tokens, in one layer: attention over all of "
        f"them, and over {record['num_chosen']:,} chosen ones. Beside them, the scores of an indexer with "
        f"{INDEX_HEADS} heads of {INDEX_SIZE}, and the choice of the best."
    )
    return page(heading("Attention over chosen tokens", record, medians(record)), text, table(columns, rows))


def _time(calls_by_name: Mapping[str, Callable[[], Any]], name: str, _: int) -> float:
    return timed(calls_by_name[name])[0]


@benchmark("chosen_tokens", write_report)
@options.repeats(7)
@options.threads(1)
@click.option("--num-tokens", default=65536, help="Tokens of the request, a multiple of 16.")
@click.option("--num-chosen", default=2048, help="Tokens that are chosen.")
def main(repeats: int, threads: int, num_tokens: int, num_chosen: int) -> dict[str, Any]:
    """Measure each state and backend; the calls of one row take turns."""
    rows = []
    for shape, backends in BACKENDS.items():
        for backend in backends:
            named_calls = calls(shape, backend, num_tokens, num_chosen)
            turns = by_turns([*named_calls], repeats, partial(_time, named_calls), warm_up=True)
            times = counted(turns)
            rows.append({"shape": shape, "backend": backend, **times})
    return {"num_tokens": num_tokens, "num_chosen": num_chosen, "repeats": repeats, "rows": rows}


if __name__ == "__main__":
    main()
