"""Runs the checks of each part with a mistake, and prints the check that finds it.

python -m tests.testing.mistakes [--whole] [PATTERN]
"""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase

from tests.testing.mistakes.finding import find
from tests.testing.mistakes.kinds import all_kinds


def main() -> None:
    """Print a line for each kind."""
    patterns = [word for word in sys.argv[1:] if word != "--whole"] or ["*"]
    chosen = {name: each for name, each in all_kinds().items() if fnmatchcase(name, patterns[0])}
    num_found = 0
    for name, each in chosen.items():
        found = find(each, whole="--whole" in sys.argv)
        num_found += bool(found)
        print(f"{name}: {found or f'missed: {each.missed}'}", flush=True)
    print(f"{num_found} of {len(chosen)} kinds are found")


if __name__ == "__main__":
    main()
