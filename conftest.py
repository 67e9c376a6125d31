"""Where there is no CUDA device, Triton's kernels run under its interpreter: said before any test imports one.

What was measured on this machine decides no test.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["KVFRAME_TIMES"] = str(Path(__file__).parent / ".cache" / "no_times.json")
