"""``kvframe plan``: how much memory a model's KV cache takes and how many requests fit, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.cli.live_range import describe_live_range
from kvframe.cli.options import (
    block_size_option,
    dtype_option,
    html_option,
    json_option,
    load_checked_plugins,
    max_model_len_option,
    memory_option,
    read_stack,
    stack_option,
)
from kvframe.cli.pages import write_page
from kvframe.cli.pages.plan import page_of_plan
from kvframe.cli.render import compact_names, format_bytes, print_facts, print_json, print_note, print_table
from kvframe.config.hub import find_model
from kvframe.contract.formats import PLAIN

if TYPE_CHECKING:
    from kvframe.contract.specs import KVCacheSpec
    from kvframe.hosting.setup import Setup
    from kvframe.planning.plan import KVCachePlan
    from kvframe.planning.tiers import TierCapacity

_SHORTEST_LISTED_LEN = 1024


@click.command(short_help="Plan a model's KV cache, and how many requests fit.")
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL_OR_CONFIG")
@memory_option
@max_model_len_option
@dtype_option
@block_size_option
@click.option(
    "--hybrid/--no-hybrid",
    default=None,
    help="Whether each layer keeps only what it needs, or every past token. Default: as in the stack.",
)
@click.option(
    "--num-tokens",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Say how many requests of this length fit; repeat for several. Default: a range of lengths.",
)
@html_option
@stack_option
@json_option
def plan(
    model: Path,
    memory: str | None,
    max_model_len: int | None,
    dtype: str | None,
    block_size: int | None,
    hybrid: bool | None,
    num_tokens: tuple[int, ...],
    html: Path | None,
    stack_file: Path | None,
    as_json: bool,
) -> None:
    """Plan a model's KV cache: groups, live ranges, pages, bytes, and how many requests fit.

    MODEL_OR_CONFIG is a Hugging Face model's folder or its config.json (no weights are read), the id of a repository
    (Qwen/Qwen3-0.6B), or a layer file: TOML or JSON that lists the layers, for which nothing heavy is loaded.
    """
    from kvframe.hosting.setup import Setup

    stack = read_stack(
        stack_file,
        cache={"memory": memory, "block_size": block_size, "hybrid": hybrid},
        model={"dtype": dtype},
        limits={"max_model_len": max_model_len},
    )
    registry = load_checked_plugins(stack).registry
    setup = Setup.read(find_model(model, weights=False), stack, registry, runs_here=False)
    cache_plan = setup.plan
    if max(num_tokens, default=0) > cache_plan.max_model_len:
        raise click.UsageError(f"--num-tokens: a request has at most {cache_plan.max_model_len} tokens")
    lengths = sorted(set(num_tokens)) or _listed_lens(cache_plan.max_model_len)
    if html is not None and cache_plan.groups:
        concurrency = _concurrency(cache_plan, lengths)
        tiers = [attrs.asdict(tier) for tier in setup.tiers()]
        page = page_of_plan(setup.description, setup.all_layers, setup.grouping, cache_plan, concurrency, tiers)
        write_page(html, "plan.html", page)
    if as_json:
        print_json(_to_dict(setup, lengths))
    else:
        _print(setup, lengths)


def _listed_lens(max_model_len: int) -> list[int]:
    """Return request lengths for the table: powers of four from 1024, and the model's longest."""
    lengths = [_SHORTEST_LISTED_LEN * 4**step for step in range(10)]
    return [*(length for length in lengths if length < max_model_len), max_model_len]


def _computed_otherwise(setup: Setup) -> list[dict[str, Any]]:
    """Return the layers that see fewer tokens than their group stores; layers with equal specs are one entry."""
    layers_by_spec: dict[tuple[int, KVCacheSpec], list[str]] = {}
    for layer in setup.all_layers:
        if layer.spec is not None and layer.spec.keeps_past:
            group = setup.grouping.group_of(layer.name)
            if layer.spec.group_key != group.spec.group_key:
                layers_by_spec.setdefault((group.index, layer.spec), []).append(layer.name)
    return [
        {"group": index, "kind": spec.kind, "needs": describe_live_range(spec, setup.max_model_len), "layers": names}
        for (index, spec), names in layers_by_spec.items()
    ]


def _host_bytes(setup: Setup) -> int:
    """Return the bytes of CPU memory for evicted blocks and preempted requests."""
    return setup.num_host_slabs(setup.plan) * setup.plan.slab_bytes


def _to_dict(setup: Setup, lengths: Sequence[int]) -> dict[str, Any]:
    cache_plan, grouping = setup.plan, setup.grouping
    plain = cache_plan.to_dict()
    for group, layer_group, entry in zip(cache_plan.groups, grouping.groups, plain["groups"], strict=True):
        entry["formats"] = {
            name: spec.kv_format.name for name, spec in zip(layer_group.layers, layer_group.stored, strict=True)
        }
        entry["live_range"] = {
            "words": describe_live_range(group.spec, cache_plan.max_model_len),
            "examples": [
                {"n": n, "ranges": [list(part) for part in group.spec.live_ranges(n)]}
                for n in _example_positions(cache_plan.max_model_len)
            ],
        }
    return {
        "model": setup.description.name,
        **plain,
        "host_bytes": _host_bytes(setup),
        "note": setup.note,
        "follows": dict(grouping.follows),
        "computed_otherwise": _computed_otherwise(setup),
        "concurrency": _concurrency(cache_plan, lengths),
        "tiers": [attrs.asdict(tier) for tier in setup.tiers()],
    }


def _concurrency(cache_plan: KVCachePlan, lengths: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"num_tokens": n, "max_requests": cache_plan.max_concurrency(n), "max_generating": cache_plan.max_generating(n)}
        for n in lengths
    ]


def _print(setup: Setup, lengths: Sequence[int]) -> None:
    from kvframe.planning.tiers import HOST_MEMORY

    description, grouping, cache_plan = setup.description, setup.grouping, setup.plan
    narrower_layers, num_draft_layers, host_bytes = (
        _computed_otherwise(setup),
        len(setup.draft_layers),
        _host_bytes(setup),
    )
    num_following = len(grouping.follows)
    sharing = f", {num_following} of them read another layer's cache" if num_following else ""
    if not cache_plan.groups:
        click.echo(f"{description.name}: {len(description.layers)} layers, no cache is needed")
        print_note(setup.note or "")
        return
    draft_text = f"; {num_draft_layers} more for draft tokens" if num_draft_layers else ""
    print_table(
        f"{description.name}: {len(description.layers)} layers{sharing}{draft_text}",
        ("group", "kind", "layers", "needs of the past"),
        [
            (
                str(group.index),
                group.spec.kind,
                f"{len(group.layers)}: {compact_names(group.layers)}",
                describe_live_range(group.spec, cache_plan.max_model_len),
            )
            for group in cache_plan.groups
        ],
    )
    print_table(
        "Pages",
        ("group", "dtypes", "block", "page", "per slab", "most blocks", "generating"),
        [
            (
                str(group.index),
                _stored_as(layer_group.stored),
                str(group.block_size) if group.block_size < cache_plan.max_model_len else "all",
                format_bytes(group.page_bytes),
                str(group.pages_per_slab),
                str(group.peak_blocks),
                str(generating),
            )
            for group, layer_group, generating in zip(
                cache_plan.groups, grouping.groups, cache_plan.generating_blocks(cache_plan.max_model_len), strict=True
            )
        ],
    )
    if narrower_layers:
        print_table(
            "Layers that see less than their group stores",
            ("group", "computed as", "layers", "sees of the past"),
            [
                (
                    str(entry["group"]),
                    entry["kind"],
                    f"{len(entry['layers'])}: {compact_names(entry['layers'])}",
                    entry["needs"],
                )
                for entry in narrower_layers
            ],
        )
    tiers = setup.tiers()
    purposes = [
        *(["evicted blocks"] if any(tier.name == HOST_MEMORY for tier in tiers) else []),
        *(["preempted requests"] if setup.stack.cache.preemption == "swap" else []),
    ]
    of_host = [("host memory", f"{format_bytes(host_bytes)} for {' and '.join(purposes)}")] if host_bytes else []
    print_facts(
        "Memory",
        [
            ("allocated", f"{format_bytes(cache_plan.total_bytes)} ({cache_plan.total_bytes:,} bytes)"),
            ("slabs", f"{cache_plan.num_slabs:,} of {format_bytes(cache_plan.slab_bytes)}"),
            *_bytes_held(cache_plan),
            ("wasted", f"{cache_plan.waste_fraction:.2%} of full slabs"),
            ("found again", _found_again(cache_plan)),
            *of_host,
        ],
    )
    print_table(
        "Requests that fit at once",
        ("tokens each", "requests", "all but one generating"),
        [(f"{n:,}", f"{cache_plan.max_concurrency(n):,}", f"{cache_plan.max_generating(n):,}") for n in lengths],
    )
    if tiers:
        print_table(
            "Prefixes that stay beside the device",
            ("tier", "bytes", "tokens", f"requests of {cache_plan.max_model_len:,} tokens"),
            [
                (
                    tier.name,
                    "unknown" if tier.num_bytes is None else format_bytes(tier.num_bytes),
                    _number_held(tier, tier.num_tokens),
                    _number_held(tier, tier.num_requests),
                )
                for tier in tiers
            ],
        )
    if setup.note is not None:
        print_note(setup.note)


def _number_held(tier: TierCapacity, number: int | None) -> str:
    if number is not None:
        return f"{number:,}"
    return "unknown" if tier.num_bytes is None else "no limit"


def _found_again(cache_plan: KVCachePlan) -> str:
    shortest = cache_plan.shortest_prefix
    return "no prefix" if shortest is None else f"prefixes of {shortest:,} tokens, and of multiples of it"


def _stored_as(specs: Sequence[KVCacheSpec]) -> str:
    """Return the formats of a group's layers, or the dtypes of plain ones."""
    dtypes = {tensor.dtype for spec in specs if spec.kv_format == PLAIN for tensor in spec.state_tensors().values()}
    formats = {spec.kv_format.name for spec in specs if spec.kv_format != PLAIN}
    return ", ".join([*sorted(dtypes), *sorted(formats)])


def _bytes_held(cache_plan: KVCachePlan) -> list[tuple[str, str]]:
    """Return the memory of a request in words: per token, per request, and per token of its other inputs."""
    facts = []
    if cache_plan.bytes_per_token:
        facts.append(("one more token", f"{format_bytes(cache_plan.bytes_per_token)} while every group keeps it"))
    if cache_plan.bytes_per_request:
        facts.append(("each request", f"{format_bytes(cache_plan.bytes_per_request)} at most, whatever its length"))
    for sequence, num_bytes in cache_plan.bytes_per_input_token.items():
        longest = cache_plan.max_input_lens[sequence]
        facts.append(
            (
                f"one {sequence} token",
                f"{format_bytes(num_bytes)}; {format_bytes(num_bytes * longest)} for the longest input, {longest:,}",
            )
        )
    return facts


def _example_positions(max_model_len: int) -> list[int]:
    """Return positions at which to show a live range: an early, a middle and the last one."""
    return sorted({min(64, max_model_len - 1), max_model_len // 2, max_model_len - 1})
