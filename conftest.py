"""Where there is no CUDA device, Triton's kernels run under its interpreter: said before any test imports one.

No test fails because the machine is busy.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from contextlib import suppress

import pytest
import torch

from kvframe.config import stack
from tests.interpreter import make_faster

HAS_GPU = torch.cuda.is_available()

# A shell starts what runs in the background with Ctrl-C ignored, and the programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors are small: more threads only compete for the cores.
torch.set_num_threads(1)

if not HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Processes that tests start compete with them for the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
with suppress(ImportError):  # a machine with a GPU runs its tests without
    from hypothesis import settings

    settings.register_profile("usual", deadline=None, max_examples=20)
    settings.register_profile("whole", deadline=None, max_examples=200)
    settings.load_profile("usual")
# A process compiles few graphs: a pool of compilers, a cache keyed by torch's sources, and programs that try each set
# of vector instructions that the processor says it has cost more than they save.
os.environ |= {
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
}
os.environ.pop("COLUMNS", None)  # what commands print is 80 columns wide


MOST_SECONDS = 300
"""How long a test may take, its fixtures included: about ten times the slowest test on a busy machine."""

LONG = {
    "test_ahead_of_time.py",
    "test_command.py",
    "test_compiled_models.py",
    "test_composition.py",
    "test_docs.py",
    "test_deployment.py",
    "test_drafts.py",
    "test_flex_backend.py",
    "test_frozen.py",
    "test_new_plugin.py",
    "test_packed.py",
    "test_runs.py",
    "test_ranks.py",
    "test_served_ranks.py",
}
"""Files with tests that take at least five seconds each."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """End a test that never ends, unless the command says when, and let stacks without a device run on the CPU."""
    if config.pluginmanager.hasplugin("timeout") and config.option.timeout is None:
        config.option.timeout = MOST_SECONDS
    # A stack that names no device would run on a GPU, and most tests give it a model on the CPU.
    stack.has_gpu = lambda: False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the tests that take longest, and skip those that need a GPU where there is none.

    A process that begins such a test last would end long after the others.
    """
    items.sort(key=lambda item: item.path.name not in LONG)
    if not HAS_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector leave out what imports and the collection make: it lives as long as the process."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup() -> None:
    """Make Triton's interpreter faster once something has imported it."""
    if interpreter := sys.modules.get("triton.runtime.interpreter"):
        make_faster(interpreter)
