"""Both ends of a pipe to an engine in a process of its own: questions and answers are lines of JSON.

    python -m benchmarks.harness.process MODULE ARGUMENT…

starts the end that answers. It calls ``load(ARGUMENT…)`` of the module, which returns the versions that the engine's
figures depend on, and a function that answers a question. This file imports nothing but Python's library, so that it
also runs in vLLM's environment.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]


class EngineProcess:
    """The end that asks; ``versions`` are those that the engine's figures depend on, empty before ``wait``."""

    def __init__(self, name: str, command: Sequence[str | Path], **options: Any) -> None:
        """Start the end that answers in the repository's root; ``options`` are arguments of ``subprocess.Popen``."""
        self.name, self.versions = name, dict[str, str]()
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            **options,
        )

    def wait(self) -> None:
        """Wait until the engine is loaded; end this program if the process ends instead."""
        self.versions = self._answer()

    def ask(self, question: Mapping[str, Any]) -> Any:
        """Return the answer; end this program if the process ends instead."""
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
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def find_vllm(peer: Path) -> Path | None:
    """Return the interpreter of vLLM's environment. Without that environment, print how to make it and return None."""
    python = peer / "bin" / "python"
    if python.exists():
        return python
    print(f"vLLM is not in {peer}: measured without it; make peer installs it", file=sys.stderr)
    return None


@contextmanager
def start_engines(
    modules: Mapping[str, Sequence[str]],
    peer: Path,
    *,
    threads: int = 1,
    files: Sequence[int] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[dict[str, EngineProcess]]:
    """Start a process for each engine, vLLM's in its own environment; the processes end with the block.

    Args:
        modules: By the engine's name, the module whose ``load`` is called, and the arguments of the call. A name that
            begins with ``vllm``, in any case, is vLLM's; if vLLM is not installed, such an engine is left out.
        peer: The folder in which ``make peer`` installed vLLM.
        threads: The number of OpenMP's threads in each process.
        files: Descriptors of files that the processes inherit.
        variables: Environment variables beside those of this process.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **(variables or {})}
    without_paths = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    vllm = find_vllm(peer) if any(map(_is_vllm, modules)) else None
    with ExitStack() as stack:
        engines = {}
        for name, arguments in modules.items():
            python, variables = (vllm, without_paths) if _is_vllm(name) else (Path(sys.executable), environment)
            if python is not None:
                command: list[str | Path] = [python, "-m", "benchmarks.harness.process", *arguments]
                process = EngineProcess(name, command, env=variables, pass_fds=files)
                engines[name] = stack.enter_context(process)
        for process in engines.values():
            process.wait()
        yield engines


def _is_vllm(name: str) -> bool:
    return name.lower().startswith("vllm")


def answer_questions(module: str, *arguments: str) -> None:
    """Load an engine and answer questions until the pipe ends."""
    # Engines print too: their standard output goes to standard error.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    versions, answer = importlib.import_module(module).load(*arguments)
    print(json.dumps(versions), file=answers)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=answers)


def map_in_processes(run: Callable[..., T], jobs: Sequence[Sequence[Any]], workers: int) -> Iterator[T]:
    """Yield the results of calls with each job's arguments, in order; a single worker is this process."""
    if workers == 1:
        yield from (run(*job) for job in jobs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(run, *zip(*jobs, strict=True))


def timed(run: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds that ``run`` takes, and what it returns."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    answer_questions(*sys.argv[1:])
