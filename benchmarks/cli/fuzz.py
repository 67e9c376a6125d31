"""Calls the command line with hostile input, many hundred times, and reports every call that does not end as it should.

A call draws a command, options, files and an environment from a seed (``cli/fuzz_cases.py``). It should end with exit
code 0, 1, 2 or 130, without a traceback, and with one line on stderr if the code is 2; no file that it was given may
change, and no file may be left behind that it was not asked for.

    python -m benchmarks.cli.fuzz --count 400 --seed 1

Most calls run in a process that is forked from one which has loaded torch; some start Python anew.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from benchmarks.cli.fuzz_cases import Case, Inputs, draw_case, make_inputs
from benchmarks.cli.fuzz_words import COMMANDS
from benchmarks.harness.machine import RESULTS, describe_machine
from benchmarks.harness.pages import heading, table
from benchmarks.harness.record import write

PLACE = "FOLDER"
"""Stands in the record for the folder of the run, which is another one in each."""

EXPECTED_CODES = (0, 1, 2, 130)
HEAVY = ("kvframe.engine.engine", "kvframe.engine.embedding", "kvframe.engine.tuning", "kvframe_transformers.adapter")
MAX_MEMORY = 12 << 30
"""Bytes of address space of a call: what it allocates beyond is refused, as on a small machine."""


@attrs.frozen(kw_only=True)
class Ending:
    """How a call ended.

    Attributes:
        code: Its exit code; negative for the signal that ended it; None if it ran into the limit.
        stderr: What it said.
        changed: Files that were given and are not as they were.
        left: Files that were left behind.
    """

    code: int | None
    stderr: str
    changed: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """What is wrong with it; empty if nothing is."""
        lines = self.stderr.splitlines()
        found = [f"changed {ascii(name)[1:-1]}" for name in self.changed]
        found += [f"left {ascii(name)[1:-1]}" for name in self.left]
        if self.code is None:
            found.append("it hangs")
        elif self.code not in EXPECTED_CODES:
            found.append(f"it ends with {self.code}")
        if "Traceback" in self.stderr or "Exception ignored" in self.stderr:
            found.append("it prints a traceback")
        elif self.code == 2 and lines and (len(lines) > 1 or not lines[0].startswith("kvframe: error: ")):
            found.append(f"it says {len(lines)} lines")
        return found


def main() -> None:
    """Make the calls that the command line asks for, and record them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=400, help="how many calls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=120, help="seconds after which a call hangs")
    parser.add_argument("--only", type=int, help="make this call alone, and show what it says")
    parser.add_argument("--without-processes", action="store_true", help="start no Python anew")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvframe-fuzz-") as folder:
        inputs = make_inputs(Path(folder) / "given")
        load_all()
        numbers = range(options.count) if options.only is None else [options.only]
        endings = {}
        for number in numbers:
            case = draw_case(random.Random(f"{options.seed} {number}"), inputs, not options.without_processes)
            endings[number] = case, run_case(case, inputs, Path(folder) / str(number), options.limit)
            say(number, *endings[number], is_shown=options.only is not None)
    record = json.loads(json.dumps(summarize(endings, options)).replace(folder, PLACE))
    if options.only is None:
        write(options.results, "fuzz_cli", record, write_report(record))
    sys.exit(1 if record["faults"] else 0)


CODES = {"0": "served", "1": "some refused", "2": "refused", "130": "interrupted"}


def write_report(record: Mapping[str, Any]) -> str:
    """Return the page of results as Markdown."""
    ended = record["ended"]
    codes = [*CODES, *sorted({code for counts in ended.values() for code in counts} - {*CODES})]
    rows = [
        (f"`kvframe {command}`", *(str(counts.get(code, 0)) for code in codes), str(sum(counts.values())))
        for command, counts in ended.items()
    ]
    what = (
        f": {record['count']} calls drawn from seed {record['seed']}, {record['processes']} of them in a Python of "
        "their own, the others forked."
    )
    lines = [
        *heading("The command line with hostile input", record["machine"], what, how="Run"),
        "",
        f"**{len(record['faults'])} faults**: tracebacks, crashes, hangs, other exit codes, more than one line for a "
        "mistake, files that changed or were left behind.",
        "",
        "How calls ended:",
        "",
        *table(("command", *(f"{code}: {CODES.get(code, 'fault')}" for code in codes), "calls"), rows),
        "",
        "What was hostile about them (a call may have several of these, or none):",
        "",
        *table(("kind", "calls"), [(name, str(count)) for name, count in record["hostile"].items()]),
        "",
        f"{len(record['sentences'])} different errors were said, by their first words.",
        "",
        *(f"- {each['number']}: {'; '.join(each['faults'])}: `{each['call']}`" for each in record["faults"]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def load_all() -> None:
    """Import what commands import, so that a forked call begins at once."""
    for module in (*(f"kvframe.cli.{command}" for command in COMMANDS), *HEAVY):
        importlib.import_module(module)


def run_case(case: Case, inputs: Inputs, folder: Path, limit: float) -> Ending:
    """Make one call in a folder of its own, and return how it ended."""
    folder.mkdir()
    case.write_files(folder)
    before, mine = snapshot(inputs.folder), snapshot(folder)
    log = folder.with_suffix(".log")
    run = run_process if case.is_process else run_forked
    with log.open("wb") as stderr:
        code = run(case, folder, stderr.fileno(), limit)
    said = log.read_bytes().decode(errors="replace").replace(str(inputs.folder.parent), PLACE)
    after, now = snapshot(inputs.folder), snapshot(folder)
    asked = {str(each) for name in case.written for each in ((folder / name), *(folder / name).parents)}
    changed = [name for name, content in {**before, **mine}.items() if {**after, **now}.get(name) != content]
    left = [name for name in {**after, **now} if name not in before and name not in mine and name not in asked]
    return Ending(code=code, stderr=said, changed=tuple(changed), left=tuple(left))


def snapshot(folder: Path) -> dict[str, str]:
    """Return a hash of every file below a folder, and what else is there by its type."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"link to {os.readlink(path)}"
        elif path.is_file():
            size = path.stat().st_size
            content = path.read_bytes() if size < 1 << 28 else str(size).encode()
            found[str(path)] = hashlib.blake2b(content).hexdigest()
        else:
            found[str(path)] = "folder" if path.is_dir() else "other"
    return found


def run_process(case: Case, folder: Path, stderr: int, limit: float) -> int | None:
    """Start Python anew."""
    environment = {**os.environ, **case.environment}

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        connect(case, stderr)

    command = [sys.executable, "-m", "kvframe", *case.arguments]
    with subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=prepare, close_fds=False) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            return None


def connect(case: Case, stderr: int) -> None:
    """Connect the standard streams of this process with what a call is given."""
    reading, writing = os.pipe()
    os.write(writing, case.stdin[:60_000])
    os.close(writing)
    os.dup2(reading, 0)
    os.dup2(os.open(case.stdout, os.O_WRONLY), 1)
    os.dup2(stderr, 2)
    for number in case.closed:
        os.close(number)


def run_forked(case: Case, folder: Path, stderr: int, limit: float) -> int | None:
    """Make the call in a copy of this process."""
    child = os.fork()
    if child == 0:
        run_as_child(case, folder, stderr)
    ends = time.monotonic() + limit
    while time.monotonic() < ends:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def run_as_child(case: Case, folder: Path, stderr: int) -> None:
    """Run the command line as a process of its own would, and end this process."""
    code: Any = 1
    try:
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
        os.environ.update(case.environment)
        connect(case, stderr)
        sys.stdin, sys.stdout, sys.stderr = (open_stream(number, case) for number in range(3))
        from kvframe.cli import main

        try:
            main([os.fsdecode(argument) for argument in case.arguments], prog_name="kvframe")
        except SystemExit as error:
            code = error.code
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException:  # it would end a process with a traceback
        import traceback

        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code if isinstance(code, int) else 1)


def open_stream(number: int, case: Case) -> Any:
    """Return a standard stream as Python makes it; None if it is closed."""
    if number in case.closed:
        return None
    return open(number, "r" if number == 0 else "w", encoding="utf-8", errors="surrogateescape", closefd=False)


def say(number: int, case: Case, ending: Ending, *, is_shown: bool) -> None:
    """Print how a call ended, if something is wrong with it."""
    if ending.faults or is_shown:
        faults = "; ".join(ending.faults)
        print(f"{number}: {case.in_words()}\n    {faults} ({ending.code})\n{ending.stderr[-3000:]}", flush=True)


def summarize(endings: Mapping[int, tuple[Case, Ending]], options: argparse.Namespace) -> dict[str, Any]:
    """Return what is recorded."""
    ended: dict[str, Counter[str]] = {}
    for case, ending in endings.values():
        ended.setdefault(case.command, Counter())[str(ending.code)] += 1
    return {
        "machine": describe_machine(int(os.environ.get("OMP_NUM_THREADS", "1"))),
        "count": len(endings),
        "seed": options.seed,
        "processes": sum(case.is_process for case, _ in endings.values()),
        "ended": {command: dict(sorted(codes.items())) for command, codes in sorted(ended.items())},
        "hostile": dict(sorted(Counter(name for case, _ in endings.values() for name in case.hostile).items())),
        "sentences": sorted({first_words(ending.stderr) for _, ending in endings.values() if ending.code == 2}),
        "faults": [
            {"number": number, "call": case.in_words(), "faults": ending.faults, "said": ending.stderr[-2000:]}
            for number, (case, ending) in endings.items()
            if ending.faults
        ],
    }


def first_words(said: str) -> str:
    """Return the beginning of an error, which tells kinds of errors from each other."""
    return " ".join(said.removeprefix("kvframe: error: ").split()[:6])[:60]


if __name__ == "__main__":
    main()
