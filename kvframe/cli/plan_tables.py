"""The tables of a plan, as ``kvframe plan`` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from kvframe.cli.live_range import describe_live_range
from kvframe.cli.render import compact_names, format_bytes, print_facts, print_note, print_table
from kvframe.contract.formats import PLAIN

if TYPE_CHECKING:
    from kvframe.contract.specs import KVCacheSpec
    from kvframe.hosting.setup import Setup
    from kvframe.planning.plan import KVCachePlan
    from kvframe.planning.tiers import TierCapacity


def computed_otherwise(setup: Setup) -> list[dict[str, Any]]:
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


def host_bytes_of(setup: Setup) -> int:
    """Return the bytes of CPU memory for evicted blocks and preempted requests."""
    return setup.num_host_slabs(setup.plan) * setup.plan.slab_bytes


def print_plan(setup: Setup, lengths: Sequence[int]) -> None:
    """Print the groups, the pages, the memory, and how many requests of some lengths fit."""
    description, grouping, cache_plan = setup.description, setup.grouping, setup.plan
    narrower_layers, num_draft_layers, host_bytes = (
        computed_otherwise(setup),
        len(setup.draft_layers),
        host_bytes_of(setup),
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
    host_facts = [("host memory", f"{format_bytes(host_bytes)} for evicted blocks")] if host_bytes else []
    print_facts(
        "Memory",
        [
            ("allocated", f"{format_bytes(cache_plan.total_bytes)} ({cache_plan.total_bytes:,} bytes)"),
            ("slabs", f"{cache_plan.num_slabs:,} of {format_bytes(cache_plan.slab_bytes)}"),
            *_bytes_held(cache_plan),
            ("wasted", f"{cache_plan.waste_fraction:.2%} of full slabs"),
            ("found again", _found_again(cache_plan)),
            *host_facts,
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
    at_first, growing = cache_plan.bytes_per_token, cache_plan.growing_bytes_per_token
    if at_first:
        later_text = f", {format_bytes(growing)} once the other groups hold their most"
        words = " at any length" if growing == at_first else f" at first{later_text}"
        facts.append(("one more token", f"{format_bytes(at_first)}{words}"))
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
