"""A Ray cluster on this machine, with a tiny model that two engines serve."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.models import save_byte_model

os.environ |= {
    "RAY_AUTH_MODE": "disabled",  # Otherwise Ray writes a token into the home folder.
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine starts processes slowly.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}

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
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="ray")  # Paths of sockets in it have to be short.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
