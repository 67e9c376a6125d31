"""Runs the checks that ``kvframe check`` runs on a part with a mistake, until one fails."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from kvframe_testing.backend_checks import backend_checks
from kvframe_testing.checks import Checks
from kvframe_testing.spec_checks import spec_checks
from kvframe_testing.wrappers import wrapper_checks

from kvframe.contract.backend import AttentionBackend
from kvframe.contract.errors import KVFrameError
from kvframe.contract.specs import KVCacheSpec
from kvframe.contract.wrapper import MetadataWrapper
from kvframe.loading.plugins import load_plugins
from kvframe.loading.registry import Registry
from tests.testing.mistakes.kinds import Kind


def find(mistake: Kind, *, whole: bool = False) -> str:
    """Return the name of the check that finds a mistake, with the error; empty if none does."""
    with _unchanged():
        try:
            checks = checks_of(mistake.part, whole=whole)
        except KVFrameError as error:
            return f"set-up: {str(error)[:150]}"
        # What finds most of these mistakes runs first.
        for check in sorted(checks.checks, key=lambda check: "served" not in check.name):
            try:
                check.run()
            except Exception as error:
                return f"{check.name}: {type(error).__name__}: {str(error)[-150:]}"
    return ""


@cache
def _registry() -> Registry:
    return load_plugins().registry


def checks_of(part: type, *, whole: bool) -> Checks:
    """Return the checks of a part."""
    if issubclass(part, AttentionBackend):
        return backend_checks(part, name="mine", whole=whole, formats=())
    if issubclass(part, MetadataWrapper):
        return wrapper_checks(part)
    assert issubclass(part, KVCacheSpec)
    return spec_checks(part, registry=_registry(), whole=whole)


@contextmanager
def _unchanged() -> Iterator[None]:
    """Undo what a part does to the process."""
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_grad_enabled(True)
        os.environ.pop("KVFRAME_MISTAKE", None)
        random.seed()
        np.random.seed()
        torch.seed()
