"""An engine in a process of its own, asked by lines of JSON and answering in them: both ends. No package is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """The end that asks.

    Attributes:
        name: The engine, in messages.
        versions: What the engine's figures depend on.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        threads: int = 1,
        is_of_other_environment: bool = False,
        files: Sequence[int] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start it, and wait until the engine is loaded.

        Args:
            name: The engine.
            command: An interpreter and the module that calls ``answer_questions``, run from the root.
            threads: Of OpenMP.
            is_of_other_environment: Whether it must not import from this environment's paths.
            files: Descriptors that it gets too.
            variables: Of its environment, beside those of this process.

        Raises:
            SystemExit: It does not start.
        """
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(variables or {})}
        if is_of_other_environment:
            environment.pop("PYTHONPATH", None)
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=files,
            env=environment,
            cwd=ROOT,
        )
        self.versions: dict[str, str] = self._answer()

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Return the answer.

        Raises:
            SystemExit: The process ended instead.
        """
        assert self._process.stdin is not None
        print(json.dumps(question), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self.name} ended with exit code {self._process.wait()}")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def find_vllm(peer: Path) -> Path | None:
    """Return the interpreter of the environment that ``make peer`` makes; None, and say so, if it is not there."""
    python = peer / "bin" / "python"
    if python.exists():
        return python
    print(f"vLLM is not in {peer}: measured without it; make peer installs it", file=sys.stderr)
    return None


@contextmanager
def start_engines(
    arguments: Mapping[str, Sequence[str]], peer: Path, **options: Any
) -> Iterator[dict[str, EngineProcess]]:
    """Start a process for each engine, vLLM's in its own environment; they end with the block.

    Args:
        arguments: By the engine's name, the module that answers and its arguments. A name that begins with ``vllm``, in
            any case, is vLLM's: such engines are left out, and this is said, if it is not installed.
        peer: Where ``make peer`` installed vLLM.
        options: Of each ``EngineProcess``.
    """
    with ExitStack() as stack:
        engines = {}
        vllm = find_vllm(peer) if any(map(_is_vllm, arguments)) else None
        for name, (module, *rest) in arguments.items():
            python = vllm if _is_vllm(name) else Path(sys.executable)
            if python is not None:
                command: list[str | Path] = [python, "-m", module, *rest]
                engine = EngineProcess(name, command, is_of_other_environment=python == vllm, **options)
                engines[name] = stack.enter_context(engine)
        yield engines


def _is_vllm(name: str) -> bool:
    return name.lower().startswith("vllm")


def answer_questions(load: Callable[[], tuple[Mapping[str, str], Callable[[dict[str, Any]], Any]]]) -> None:
    """Load an engine and answer until there are no more questions: the other end.

    Args:
        load: Returns the versions that the engine's figures depend on, and what answers a question.
    """
    # What engines print is not an answer.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    versions, answer = load()
    print(json.dumps(versions), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that ``run`` takes, and what it returns."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result
