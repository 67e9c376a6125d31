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
    kinds = {name: mistake for name, mistake in all_kinds().items() if fnmatchcase(name, patterns[0])}
    num_found = 0
    for name, mistake in kinds.items():
        check_name = find(mistake, whole="--whole" in sys.argv)
        num_found += bool(check_name)
        print(f"{name}: {check_name or f'missed: {mistake.missed}'}", flush=True)
    print(f"{num_found} of {len(kinds)} kinds are found")


if __name__ == "__main__":
    main()
