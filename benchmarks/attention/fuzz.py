"""Run the kernels on random layers and steps that the contract lets through, with each access to memory checked.

See benchmarks/README.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click

from benchmarks.harness import options
from benchmarks.harness.pages import heading, page, table
from benchmarks.harness.record import benchmark
from tests.attention import checked_kernels

ROOT = Path(__file__).resolve().parents[2]
MOST_FAILURES = 10
COMMAND = (sys.executable, "-m", "benchmarks.attention.fuzz_worker")


@attrs.frozen
class Kernels:
    """Kernels to run.

    Attributes:
        kind: Which backend runs them.
        how: How their accesses are checked, in words.
        share: The part of the cases that they get: interpreted kernels are slow.
        machine: The processor that they are compiled for, for C++.
    """

    kind: str
    how: str
    share: float = 1.0
    machine: str | None = None


_SANITIZERS = "the address sanitizer and the one for undefined behaviour"
_INTERPRETER = "every address, in Triton's interpreter; the sanitizers for the C code that plans steps"

KERNELS: Mapping[str, Kernels] = {
    **{
        f"C++ for {machine}": Kernels("cpu", _SANITIZERS, machine=machine)
        for machine in ("native", "x86-64-v3", "x86-64")
    },
    "numba": Kernels("numba", "every index, by `NUMBA_BOUNDSCHECK`", 0.25),
    "triton": Kernels("triton", _INTERPRETER, 0.25),
    "triton_mla": Kernels("triton_mla", _INTERPRETER, 0.1),
}


def run(kernels: Kernels, first: int, count: int, folder: Path) -> dict[str, Any]:
    """Run the cases of the seeds from ``first`` on; return how many there were of each trait, and the failures.

    Args:
        kernels: The kernels.
        first: The first seed.
        count: The number of cases.
        folder: An empty folder, for what is compiled.
    """
    environment: Mapping[str, str] = {**os.environ, **checked_kernels.NUMBA_CHECKS}
    arguments: list[str] = []
    if kernels.kind != "numba":
        sanitized = checked_kernels.sanitizer_environment()
        if sanitized is None:
            raise click.ClickException("the compiler lacks the address sanitizer")
        environment = sanitized
        if kernels.machine is not None:
            library = checked_kernels.build_sanitized(kernels.machine)
        else:
            library, environment = (
                checked_kernels.build_sanitized_plan(folder),
                {**environment, "TRITON_INTERPRET": "1"},
            )
        arguments = [str(library)]
    environment = {**environment, "NUMBA_CACHE_DIR": str(folder)}
    traits: Counter[str] = Counter()
    failures: dict[int, str] = {}
    begin, seed, planted = time.monotonic(), first, ""
    while seed < first + count and len(failures) < MOST_FAILURES:
        command = [kernels.kind, str(seed), str(first + count - seed), *arguments]
        result = call(command, environment, traits, failures)
        planted = result["planted"]
        seed = 1 + result["last"]
    return {
        "how": kernels.how,
        "cases": seed - first,
        "seconds": time.monotonic() - begin,
        "planted": planted,
        "failures": failures,
        "traits": dict(sorted(traits.items())),
    }


def call(
    arguments: Sequence[str], environment: Mapping[str, str], traits: Counter[str], failures: dict[int, str]
) -> dict[str, Any]:
    """Run one process until it ends; add to the traits and failures; return its last seed, and the planted access.

    A process that ends within a case has found a wrong access there.
    """
    last, running, is_planted, planted = int(arguments[1]), False, False, ""
    with tempfile.TemporaryFile("w+") as errors:
        command = [*COMMAND, *arguments]
        with subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                message = json.loads(line)
                if "seed" in message:
                    last, running = message["seed"], True
                    traits.update(message["traits"])
                elif "done" in message:
                    running = False
                    if message["problem"] is not None:
                        failures[last] = message["problem"]
                        print(f"seed {last}: {message['problem']}", file=sys.stderr, flush=True)
                planted = "missed" if "missed" in message else "reported" if "caught" in message else planted
                is_planted = "planted" in message
        code = process.wait()
        errors.seek(0)
        report = report_in(errors.read())
    if code and running:
        failures[last] = report
        print(f"seed {last}: {report}", file=sys.stderr, flush=True)
    elif code and is_planted:
        planted = "reported"
    elif code:
        raise click.ClickException(f"{' '.join([*COMMAND, *arguments])} ends with {code}: {report}")
    return {"last": last, "planted": planted}


def report_in(text: str) -> str:
    """Return the line of a sanitizer's report that says what was found, and the first one of the kernels' code."""
    lines = text.splitlines()
    what = [line for line in lines if "ERROR: AddressSanitizer" in line or "runtime error" in line]
    where = [line.strip() for line in lines if "kvframe_kernels" in line or "kvframe::" in line]
    return " ".join((*what[:1], *where[:1])) or "\n".join(lines[-3:])


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    kernels = record["kernels"]
    cases = sum(kernel["cases"] for kernel in kernels.values())
    num_failures = sum(len(kernel["failures"]) for kernel in kernels.values())
    names = sorted({name for kernel in kernels.values() for name in kernel["traits"]})
    return page(
        heading(
            "Kernels on everything that the contract lets through",
            record,
            f": {cases:,} cases, {num_failures} failures.",
            how="Run",
        ),
        "A case is a random layer and step that a backend's capabilities and the checks of the contract allow. A "
        "failure is an access to memory that is not the case's, or a result beyond the bound of the conformance kit. "
        "At the end, a block table that names a page after the last one shows that such an access is reported. The "
        "address sanitizer does not see the masked loads of AVX-512, which the builds for older processors do without.",
        table(
            ("kernels", "what is checked", "cases", "failures", "an access after the last page", "seconds"),
            [
                (
                    name,
                    kernel["how"],
                    f"{kernel['cases']:,}",
                    f"{len(kernel['failures'])}",
                    kernel["planted"],
                    f"{kernel['seconds']:,.0f}",
                )
                for name, kernel in kernels.items()
            ],
        ),
        "## Cases by property",
        table(
            ("property", *kernels),
            [(name, *(f"{kernel['traits'].get(name, 0):,}" for kernel in kernels.values())) for name in names],
        ),
        table(
            ("kernels", "seed", "failure"),
            [
                (name, f"{seed}", failure.replace("\n", " "))
                for name, kernel in kernels.items()
                for seed, failure in kernel["failures"].items()
            ],
        ),
    )


def failed(record: Mapping[str, Any]) -> bool:
    """Return whether a case failed, or the planted access was missed."""
    return any(kernel["failures"] or kernel["planted"] != "reported" for kernel in record["kernels"].values())


@benchmark("kernels_fuzz", write_report, fails=failed, cases="kernels")
@options.choose("--kernels", "names", KERNELS)
@click.option(
    "--cases", type=click.IntRange(min=1), default=4000, show_default=True, help="The cases of each C++ build."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
def main(names: Sequence[str], cases: int, seed: int) -> dict[str, Any]:
    """Run the kernels; write one JSON file and one page."""
    results = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            results[name] = run(KERNELS[name], seed, max(1, int(cases * KERNELS[name].share)), Path(folder))
    return {"first_seed": seed, "kernels": results}


if __name__ == "__main__":
    main()
