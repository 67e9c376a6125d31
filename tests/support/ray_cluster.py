"""A Ray cluster of this machine, for tests and benchmarks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.ports import free_port

os.environ |= {
    "RAY_AUTH_MODE": "disabled",  # Otherwise Ray writes a token into the home folder.
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine starts processes slowly.
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}


@contextmanager
def ray_cluster() -> Iterator[str]:
    """Start Ray and its HTTP proxy; yield the proxy's address."""
    import ray
    from ray import serve

    folder = tempfile.mkdtemp(prefix="ray")  # Paths of sockets in it have to be short.
    port = free_port()
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
