"""Compares every type that transformers has, and writes ``plugins/MODELS.md``: ``python -m tests.models.census``."""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.harness.machine import describe_machine
from tests.models.census.compare import GROUPS, Verdict, compare
from tests.models.census.table import Census, as_json, from_json, render

ROOT = Path(__file__).resolve().parents[3]
RECORD, PAGE = ROOT / "plugins" / "models.json", ROOT / "plugins" / "MODELS.md"

_SECONDS = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare types, each in a process of its own; return 1 if a model's results are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.census", description=main.__doc__)
    parser.add_argument("types", nargs="*", help="only these types; nothing is written then")
    parser.add_argument("--group", choices=GROUPS, help="only this group; nothing is written then")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    options = parser.parse_args(arguments)
    pairs = [
        (group, type_name)
        for group, type_group in GROUPS.items()
        for type_name in type_group.types
        if (not options.types or type_name in options.types) and options.group in (None, group)
    ]
    with ThreadPoolExecutor(options.jobs) as threads:
        results = list(zip(pairs, threads.map(_apart, pairs), strict=True))
    verdicts = {group: {name: verdict for (own, name), verdict in results if own == group} for group in GROUPS}
    for group, verdicts_by_name in verdicts.items():
        words = [verdict.word for verdict in verdicts_by_name.values()]
        print(group, {word: words.count(word) for word in sorted(set(words))})
    if not options.types and options.group is None:
        machine = describe_machine(1)
        versions = f"Python {machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}"
        census = Census(machine["date"], machine["commit"], versions, verdicts)
        RECORD.write_text(as_json(census), encoding="utf-8")
        PAGE.write_text(render(from_json(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
    return 1 if any(verdict.word == "wrong" for _, verdict in results) else 0


def _apart(pair: tuple[str, str]) -> Verdict:
    """Compare a type in a process of its own, which may end in any way."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, *pair))
    process.start()
    sender.close()
    verdict = Verdict("fails", f"took more than {_SECONDS} s")
    try:
        if receiver.poll(2 * _SECONDS):  # the process itself ends in time, unless it hangs outside of Python
            verdict = receiver.recv()
    except EOFError:
        verdict = Verdict("fails", "its process ended")
    process.kill()
    process.join()
    print(*pair, verdict.word, verdict.why, sep="\t", flush=True)
    return verdict


def _send(sender: multiprocessing.connection.Connection, group: str, model_type: str) -> None:
    sender.send(compare(group, model_type, _SECONDS))


if __name__ == "__main__":
    sys.exit(main())
