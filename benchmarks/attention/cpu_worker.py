"""One engine's attention in a process of its own, which does a turn whenever it is told to.

    python -m benchmarks.attention.cpu_worker SYSTEM THREADS FILE

SYSTEM is a backend's registered name, ``naive``, or ``vllm`` in vLLM's environment; FILE is the
descriptor of shared memory. Each line of its input is a turn as JSON, each line of its output the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention.cpu_shapes import Buffers, Step, block_table, num_pages, slots
from benchmarks.attention.shapes import Shape
from benchmarks.harness.process import answer_questions, timed

if TYPE_CHECKING:
    from benchmarks.attention.cpu_kvframe import KVFrame
    from benchmarks.attention.cpu_vllm import VLLM

SLOW_SECONDS = 0.1
"""A step that takes longer is timed once in a turn."""


class Naive:
    """What a user writes first: ``k[block_table]`` and torch's attention, request by request of equal length."""

    def describe(self) -> dict[str, str]:
        """Return torch's version."""
        return {"torch": torch.__version__}

    def why_not(self, shape: Shape) -> str:
        """Return why a batch is not computed: it has to be dense."""
        alike = len(set(shape.requests)) == 1 and (shape.requests[0][0] == 0 or shape.requests[0][1] == 1)
        return "" if alike and shape.window is None else "is for dense batches only"

    def prepare(self, shape: Shape, buffers: Buffers) -> Step:
        """Lay keys and values out as ``[num_pages, block_size, num_kv_heads, head_size]`` each."""
        page = shape.block_size, shape.num_kv_heads, shape.head_size
        key, value = buffers.pool.view(shape.torch_dtype).view(2, num_pages(shape), *page)
        table = block_table(shape).long()
        places = slots(shape, table)
        key.flatten(0, 1)[places], value.flatten(0, 1)[places] = buffers.key, buffers.value
        num_reqs, (computed, new) = len(shape.requests), shape.requests[0]
        query = buffers.query.view(num_reqs, new, shape.num_heads, shape.head_size).transpose(1, 2)

        def attend() -> torch.Tensor:
            keys, values = (each[table].flatten(1, 2)[:, : computed + new].transpose(1, 2) for each in (key, value))
            result = scaled_dot_product_attention(query, keys, values, is_causal=new > 1, enable_gqa=True)
            return result.transpose(1, 2).flatten(0, 1)

        return lambda: None, attend


def make_engine(system: str) -> Naive | KVFrame | VLLM:
    """Return the engine of this name; all have the methods of ``Naive``."""
    if system == "naive":
        return Naive()
    if system == "vllm":
        from benchmarks.attention.cpu_vllm import VLLM

        return VLLM()
    from benchmarks.attention.cpu_kvframe import KVFrame

    return KVFrame(system)


def do_turn(engine: Naive | KVFrame | VLLM, shape: Shape, file: int, calls: int) -> dict[str, Any]:
    """Write the pool, warm up, time the calls, and leave the output for the comparison."""
    refused = engine.why_not(shape)
    if refused:
        return {"refused": refused}
    buffers = Buffers(file, shape)
    # The ends of last pages are hidden by all engines, and by vLLM only as long as they hold numbers.
    buffers.pool.zero_()
    build, attend = engine.prepare(shape, buffers)
    build()
    warm_up, output = timed(attend)
    buffers.output.copy_(output)
    if warm_up > SLOW_SECONDS:
        calls = 1
    builds = [timed(build)[0] for _ in range(calls)]
    return {"seconds": [timed(attend)[0] for _ in range(calls)], "metadata_seconds": builds}


def main() -> None:
    """Answer turns until there are no more."""
    system, threads, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def load() -> tuple[dict[str, str], Callable[[dict[str, Any]], Any]]:
        torch.set_num_threads(threads)
        engine = make_engine(system)
        return engine.describe(), lambda turn: do_turn(engine, Shape.of(turn["shape"]), file, turn["calls"])

    with torch.inference_mode():
        answer_questions(load)


if __name__ == "__main__":
    main()
