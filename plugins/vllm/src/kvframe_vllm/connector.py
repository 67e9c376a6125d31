"""The connector by which vLLM uses the page stores of the stack: ``--kv-transfer-config`` names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvframe_vllm.adapter.weights import digests_of_weights
from kvframe_vllm.transfer.messages import StepTransfers, WorkerOrigin
from kvframe_vllm.transfer.scheduling import PrefixScheduler
from kvframe_vllm.transfer.setup import make_transfer
from kvframe_vllm.transfer.working import PageMover, origin_of


class KVFrameConnector(KVConnectorBase_V1, SupportsHMA):
    """Passes vLLM's calls on: in the scheduler to a ``PrefixScheduler``, in a worker to a ``PageMover``."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Make the stores.

        Raises:
            KVFrameError: The stack has no store, or vLLM is set up so that it cannot use one.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        transfer_config = vllm_config.kv_transfer_config
        self._transfer = make_transfer(vllm_config, kv_cache_config)
        self._mover: PageMover | None = None
        self._scheduler: PrefixScheduler | None = None
        if role == KVConnectorRole.SCHEDULER:
            # By vLLM's default, a page that a store lost ends its request.
            transfer_config.kv_load_failure_policy = "recompute"
            self._scheduler = PrefixScheduler(
                self._transfer, loads=transfer_config.is_kv_consumer, saves=transfer_config.is_kv_producer
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a page that is not stored is computed again."""
        return False

    # --- in a worker --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the worker's memory: the cache of each layer, ``[num_blocks, ...]``, device."""
        stages, shares = get_pp_group(), get_tp_group()
        ranks = ", ".join(f"{group.rank_in_group} of {group.world_size}" for group in (stages, shares))
        origin = origin_of(self._vllm_config, digests_of_weights(), ranks)
        self._mover = PageMover(self._transfer, kv_caches, self._kv_cache_config.num_blocks, origin)

    def get_handshake_metadata(self) -> WorkerOrigin | None:
        """Return what names the worker's pages, for the scheduler."""
        return None if self._mover is None else WorkerOrigin(self._mover.texts)

    def start_load_kv(self, forward_context: Any, **options: Any) -> None:
        """Begin to load what the scheduler says. A request does not run before its pages arrived."""
        self._worker.begin(self._step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request runs when all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **options: Any) -> None:
        """Do nothing: pages have all layers of a group, so ``wait_for_save`` copies them after the step."""

    def wait_for_save(self) -> None:
        """Copy the pages that the step completed."""
        self._worker.save(self._step.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return the requests whose pages arrived, and those whose pages did not."""
        ended, failed = self._worker.finish()
        return KVConnectorTransferResults(finished_recving=ended, failed_recving=failed)

    @property
    def _worker(self) -> PageMover:
        assert self._mover is not None
        return self._mover

    @property
    def _step(self) -> StepTransfers:
        step = self._get_connector_metadata()
        assert isinstance(step, StepTransfers)
        return step

    # --- in the scheduler ---------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take vLLM's block pool."""
        self._planner.bind(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Take what names the pages of each worker."""
        self._planner.connect([metadata[rank].texts for rank in sorted(metadata)])

    def on_new_request(self, request: Any) -> None:
        """Take a new request."""
        self._planner.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many more tokens the stores have, and that their pages arrive between steps."""
        found = self._planner.count_found(request, num_computed_tokens)
        return found, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks that a request got."""
        self._planner.take_blocks(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepTransfers:
        """Return what the workers move in this step."""
        return self._planner.plan(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take which loads failed."""
        self._planner.note_failed(connector_output.failed_recving)

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Forget a request. Its blocks are copied, so vLLM may free them."""
        self._planner.remove(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """Use the stores no longer: vLLM clears its caches when its weights change."""
        self._planner.switch_off()
        return True

    @property
    def _planner(self) -> PrefixScheduler:
        assert self._scheduler is not None
        return self._scheduler

    # --- in both ------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the threads; a worker first writes what is queued."""
        if self._mover is not None:
            self._mover.close()
        if self._scheduler is not None:
            self._scheduler.close()
