"""A Ray cluster on this machine, with a tiny model that two engines serve."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import save_byte_model
from tests.support.ray_cluster import ray_cluster

STACK = """
[cache]
memory = "4MiB"
[limits]
max_num_batched_tokens = 256
"""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    save_byte_model(folder)
    return folder


@pytest.fixture(scope="session")
def stack_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("stack") / "stack.toml"
    file.write_text(STACK)
    return file


@pytest.fixture(scope="session")
def loaded_ray() -> None:
    """Load Ray: here, because every process of a test run would load it otherwise, for seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ray import serve  # noqa: F401


@pytest.fixture
def url(loaded_ray: None) -> Iterator[str]:
    """Start Ray and its HTTP proxy, and return its address."""
    with ray_cluster() as address:
        yield address
