"""``kvframe plan``: how much memory a model's KV cache takes and how many requests fit, before anything is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.cli.device_memory import (
    NOTHING_FITS_EXIT_CODE,
    SizeType,
    device_to_dict,
    print_device,
    print_how_to_run,
)
from kvframe.cli.live_range import describe_live_range
from kvframe.cli.options import (
    block_size_option,
    dtype_option,
    html_option,
    json_option,
    load_checked_plugins,
    max_model_len_option,
    read_stack,
    stack_option,
)
from kvframe.cli.pages import write_page
from kvframe.cli.pages.plan import page_of_plan
from kvframe.cli.plan_tables import computed_otherwise, host_bytes_of, print_plan
from kvframe.cli.render import print_json

if TYPE_CHECKING:
    from kvframe.hosting.setup import Setup

_SHORTEST_LISTED_LEN = 1024


@click.command(short_help="Plan a model's KV cache, and how many requests fit.")
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL_OR_CONFIG")
@click.option(
    "--memory",
    "device_memory",
    type=SizeType(),
    metavar="SIZE",
    help="The device's memory, such as 80GB: say whether the model starts there, and give its cache what the weights "
    "and the reserve leave.",
)
@click.option(
    "--cache-memory",
    type=SizeType(takes_auto=True),
    metavar="SIZE",
    help="The cache's memory, such as 2GiB, or auto, whatever the device has. Default: as in the stack.",
)
@click.option(
    "--reserve",
    type=SizeType(),
    metavar="SIZE",
    help="What --memory leaves for activations and the runtime. Default: a tenth of it, and at least 1GiB.",
)
@click.option(
    "--tensor-parallel",
    "num_ranks",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="Plan one of N ranks that share the model's heads and weights; the memory is that of each.",
)
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
    device_memory: int | None,
    cache_memory: int | str | None,
    reserve: int | None,
    num_ranks: int,
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
    from kvframe.hosting.device_plan import DevicePlan, default_reserve, setup_of_share
    from kvframe.hosting.setup import Setup
    from kvframe.planning.recognise import find_model, find_reader

    if device_memory is not None and cache_memory is not None:
        raise click.UsageError("give one of --memory, the device's, and --cache-memory, the cache's")
    if device_memory is None and reserve is not None:
        raise click.UsageError("--reserve is a part of --memory; give that too")
    stack = read_stack(
        stack_file,
        cache={"memory": cache_memory, "block_size": block_size, "hybrid": hybrid},
        model={"dtype": dtype},
        limits={"max_model_len": max_model_len},
    )
    registry = load_checked_plugins(stack).registry
    path = find_model(model, weights=False, registry=registry)
    reader = find_reader(path, registry)
    setup, device = Setup.read(path, stack, registry, runs_here=False, reader=reader), None
    if device_memory is not None:
        reserve = default_reserve(device_memory) if reserve is None else reserve
        device = DevicePlan(
            path=path,
            reader=reader,
            whole=setup,
            num_ranks=num_ranks,
            memory_bytes=device_memory,
            reserved_bytes=reserve,
        )
        setup = device.setup
    elif num_ranks > 1:
        description, model_dtype = setup.description, setup.stack.model.dtype
        share = reader.share_of_rank(path, description, dtype=model_dtype, num_ranks=num_ranks)
        setup = setup_of_share(setup, share)
    max_tokens = setup.max_model_len
    if max(num_tokens, default=0) > max_tokens:
        raise click.UsageError(f"--num-tokens: a request has at most {max_tokens} tokens")
    starts = device is None or device.plan is not None
    lengths = (sorted(set(num_tokens)) or _listed_lens(max_tokens)) if starts else []
    facts = {"model": setup.description.name} | ({} if device is None else {"device": device_to_dict(device)})
    if html is not None:
        page = page_of_plan(setup, starts, _concurrency(setup, lengths))
        write_page(html, "plan.html", facts | {"runs_on": stack.model.device} | page)
    if as_json:
        print_json(facts | (_to_dict(setup, lengths) if starts else {}))
    else:
        if device is not None:
            print_device(device)
        if starts:
            print_plan(setup, lengths)
            if device is not None:
                print_how_to_run(device)
    if not starts:
        click.get_current_context().exit(NOTHING_FITS_EXIT_CODE)


def _listed_lens(max_model_len: int) -> list[int]:
    """Return request lengths for the table: powers of four from 1024, and the model's longest."""
    lengths = [_SHORTEST_LISTED_LEN * 4**step for step in range(10)]
    return [*(length for length in lengths if length < max_model_len), max_model_len]


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
        **plain,
        "host_bytes": host_bytes_of(setup),
        "note": setup.note,
        "follows": dict(grouping.follows),
        "computed_otherwise": computed_otherwise(setup),
        "concurrency": _concurrency(setup, lengths),
        "tiers": [attrs.asdict(tier) for tier in setup.tiers()],
    }


def _concurrency(setup: Setup, lengths: Sequence[int]) -> list[dict[str, Any]]:
    return [
        {"num_tokens": n, "max_requests": setup.plan.max_concurrency(n), "max_generating": setup.plan.max_generating(n)}
        for n in lengths
    ]


def _example_positions(max_model_len: int) -> list[int]:
    """Return positions at which to show a live range: an early, a middle and the last one."""
    return sorted({min(64, max_model_len - 1), max_model_len // 2, max_model_len - 1})
