"""What the connector's parts in the scheduler and in the workers tell each other, through vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata


@dataclass
class Pages:
    """Pages of one group.

    Attributes:
        keys: Each page's key, vLLM's hash of all tokens up to its end.
        block_ids: Each page's block in vLLM's memory.
    """

    keys: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


@dataclass
class Load:
    """The pages that a waiting request needs and vLLM does not have.

    Attributes:
        request_id: The request.
        groups: Its pages, one entry per group.
        max_seconds: How long the request waits for them.
    """

    request_id: str
    groups: list[Pages]
    max_seconds: float


@dataclass
class StepTransfers(KVConnectorMetadata):
    """What the workers move in a step.

    Attributes:
        loads: What they begin to load.
        saves: The pages that this step completes, one entry per group.
    """

    loads: list[Load]
    saves: list[Pages]


@dataclass
class WorkerOrigin(KVConnectorHandshakeMetadata):
    """The texts that tell a worker's pages from those of other models, layouts and ranks; equal texts share pages."""

    texts: tuple[str, ...]
