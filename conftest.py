"""Where there is no CUDA device, Triton's kernels run under its interpreter: said before any test imports one."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
