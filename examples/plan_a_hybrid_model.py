"""Plan the cache of a hybrid model from a file that lists its layers: no weights, no torch.

    python examples/plan_a_hybrid_model.py [LAYER_FILE] [MEMORY]

prints what each group needs and how many requests fit, once with every layer keeping only what it still needs and
once with every layer keeping every token.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvframe import KVCachePlan, Registry, Stack, group_layers, load_plugins, make_layer_specs, plan_cache
from kvframe.config.stack import parse_bytes
from kvframe.contract import KVFrameError
from kvframe.planning.layer_file import read_layer_file

LAYERS = Path(__file__).parent / "layers" / "gemma_3_27b.json"
LENGTHS = (8_192, 32_768, 131_072)


def make_plan(path: Path, memory: str, registry: Registry, *, hybrid: bool) -> KVCachePlan:
    """Go from the layers to the plan: the first half of the flow, each step a plain value."""
    description = read_layer_file(path)
    layers = make_layer_specs(description, registry, Stack(), dtype="bfloat16")
    grouping = group_layers(layers, hybrid=hybrid)
    return plan_cache(
        grouping,
        memory_bytes=parse_bytes(memory),
        max_model_len=description.max_model_len,
        max_num_batched_tokens=2048,
    )


def main(path: Path = LAYERS, memory: str = "64GiB") -> None:
    """Print both plans side by side."""
    registry = load_plugins().registry
    hybrid = make_plan(path, memory, registry, hybrid=True)
    dense = make_plan(path, memory, registry, hybrid=False)
    print(f"{path.stem}, {memory} of cache, bfloat16")
    for group in hybrid.groups:
        print(
            f"  group {group.index}: {group.spec.kind}, {len(group.layers)} layers, {group.page_bytes:,} bytes a page, "
            f"at most {group.peak_blocks:,} blocks for a request of {hybrid.max_model_len:,} tokens"
        )
    print(f"{'tokens per request':>20} {'requests':>10} {'all full':>10}")
    for num_tokens in (length for length in LENGTHS if length <= hybrid.max_model_len):
        print(f"{num_tokens:>20,} {hybrid.max_concurrency(num_tokens):>10,} {dense.max_concurrency(num_tokens):>10,}")


if __name__ == "__main__":
    path_given = Path(sys.argv[1]) if len(sys.argv) > 1 else LAYERS
    try:
        main(path_given, *sys.argv[2:3])
    except KVFrameError as error:
        sys.exit(f"error: {error}")
