"""One engine's attention in a process of its own, which does a turn whenever it is told to.

    python -m benchmarks.attention.cpu_worker SYSTEM THREADS FILE

SYSTEM is a backend's registered name, or ``vllm`` in vLLM's environment; FILE is the descriptor
of shared memory. Each line of its input is a turn as JSON, each line of its output the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.attention.cpu_shapes import Buffers
from benchmarks.attention.shapes import Shape
from benchmarks.harness.process import answer_questions, timed

if TYPE_CHECKING:
    from benchmarks.attention.cpu_kvframe import KVFrame
    from benchmarks.attention.cpu_vllm import VLLM

CALLS = 3
SLOW_SECONDS = 0.1
"""A step that takes longer is timed once in a turn."""


def make_engine(system: str) -> KVFrame | VLLM:
    """Return the engine of this name; both have the same methods."""
    if system == "vllm":
        from benchmarks.attention.cpu_vllm import VLLM

        return VLLM()
    from benchmarks.attention.cpu_kvframe import KVFrame

    return KVFrame(system)


def do_turn(engine: KVFrame | VLLM, shape: Shape, file: int) -> dict[str, Any]:
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
    calls = CALLS if warm_up <= SLOW_SECONDS else 1
    builds = [timed(build)[0] for _ in range(calls)]
    return {"seconds": [timed(attend)[0] for _ in range(calls)], "metadata_seconds": builds}


def main() -> None:
    """Answer turns until there are no more."""
    system, threads, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])

    def load() -> tuple[dict[str, str], Callable[[dict[str, Any]], Any]]:
        torch.set_num_threads(threads)
        engine = make_engine(system)
        return engine.describe(), lambda turn: do_turn(engine, Shape.of(turn["shape"]), file)

    with torch.inference_mode():
        answer_questions(load)


if __name__ == "__main__":
    main()
