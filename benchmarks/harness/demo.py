"""The model of the demo, which is trained once."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.harness.machine import ROOT

DEMO = ROOT / "examples" / "demo"


def demo_path() -> Path:
    """Return the folder of the demo's model; train the model if it is missing."""
    sys.path.insert(0, str(DEMO))
    from make_model import make_model

    path: Path = make_model().path
    return path
