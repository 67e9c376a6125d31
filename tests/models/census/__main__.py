"""Compares every type that transformers has, and writes ``plugins/MODELS.md``: ``python -m tests.models.census``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.models.census.compare import GROUPS, Verdict, compare

_PROCESSES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare types, each in a process of its own; return 1 if a model's results are wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.census", description=main.__doc__)
    parser.add_argument("types", nargs="*", help="only these types; nothing is written then")
    parser.add_argument("--group", choices=GROUPS, help="only this group; nothing is written then")
    asked = parser.parse_args(arguments)
    pairs = [
        (group, each)
        for group, found in GROUPS.items()
        for each in found.types
        if (not asked.types or each in asked.types) and asked.group in (None, group)
    ]
    with ThreadPoolExecutor(_PROCESSES) as threads:
        verdicts = dict(zip(pairs, threads.map(_apart, pairs), strict=True))
    for group in GROUPS:
        words = [verdict.word for (own, _), verdict in verdicts.items() if own == group]
        print(group, {word: words.count(word) for word in sorted(set(words))})
    return 1 if any(verdict.word == "wrong" for verdict in verdicts.values()) else 0


def _apart(pair: tuple[str, str]) -> Verdict:
    """Compare a type in a process of its own, which may end in any way."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        sender.send(compare(*pair))

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        verdict: Verdict = receiver.recv()
    except EOFError:
        verdict = Verdict("fails", "its process ended")
    process.join()
    print(*pair, verdict.word, verdict.why, sep="\t", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
