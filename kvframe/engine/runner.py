"""Running a step: from the scheduled requests to packed tensors, through the model, to the next tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kvframe.attention.layer import AttentionLayers
from kvframe.attention.step import StepBatch, build_metadata
from kvframe.cache.block_table import BlockTables
from kvframe.engine.sampling import sample
from kvframe.engine.scheduler import ScheduledStep
from kvframe.model.adapter import LoadedModel

IntArray = npt.NDArray[np.int64]


class ModelRunner:
    """Runs packed batches of a model.

    Invariant: ``tokens[row, :n]`` are the ``n`` known tokens of the request that has ``row`` in the block tables.

    Attributes:
        tokens: ``[max_num_seqs, max_model_len], int64, host``.
    """

    def __init__(
        self,
        model: LoadedModel,
        layers: AttentionLayers,
        tables: BlockTables,
        device: torch.device,
        *,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        """Take what a step needs.

        Args:
            model: The model, attached to ``layers``.
            layers: Its attention layers.
            tables: The block tables of the cache manager that gives out rows, one per cache group.
            device: Where the model runs.
            max_num_seqs: The most requests at a time.
            max_model_len: The most tokens of a request.
        """
        self.tokens: IntArray = np.empty((max_num_seqs, max_model_len), dtype=np.int64)
        self._model = model
        self._layers = layers
        self._tables = tables
        self._device = device

    def run(self, step: ScheduledStep) -> list[int]:
        """Compute a step and return one token for each request whose last known token it computes.

        Args:
            step: The step; every request has a row and room for its tokens.

        Returns:
            Token ids in the step's order; ``sampling.FAILED`` where the logits are not numbers.
        """
        requests = step.requests
        for request in step.admitted:
            self.tokens[request.row, : len(request.token_ids)] = request.token_ids
        rows = np.array([request.row for request in requests], dtype=np.int64)
        num_computed = np.array([request.num_computed for request in requests], dtype=np.int64)
        query_lens = np.array([request.num_scheduled for request in requests], dtype=np.int64)
        num_known = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
        num_after = num_computed + query_lens
        is_generating = num_after == num_known
        logits_indices = (np.cumsum(query_lens) - 1)[is_generating]
        logits = self.forward(rows, num_computed, query_lens, logits_indices)
        if not len(logits_indices):
            return []
        if len(logits_indices) < len(requests):
            requests = [request for request, generates in zip(requests, is_generating, strict=True) if generates]
            rows, num_after = rows[is_generating], num_after[is_generating]
        token_ids = sample(logits, requests)
        self.tokens[rows, num_after] = token_ids
        return token_ids

    def forward(
        self, rows: IntArray, num_computed: IntArray, query_lens: IntArray, logits_indices: IntArray
    ) -> torch.Tensor:
        """Run the model over one packed batch whose tokens are in ``tokens``.

        Args:
            rows: ``[num_reqs]``: each request's row.
            num_computed: ``[num_reqs]``: tokens that were computed before.
            query_lens: ``[num_reqs]``: tokens to compute.
            logits_indices: ``[num_generating]``: the packed tokens whose logits are wanted.

        Returns:
            Logits ``[num_generating, vocab_size], device``.
        """
        batch = StepBatch(
            rows=rows, num_computed=num_computed, query_lens=query_lens, generating_indices=logits_indices
        )
        requests, positions = batch.token_positions
        metadata = build_metadata(batch, self._tables, self._device)
        input_ids = torch.from_numpy(self.tokens[rows[requests], positions])
        with torch.inference_mode():
            self._layers.begin_step(metadata)
            return self._model.forward(
                input_ids.to(self._device, non_blocking=True),
                torch.from_numpy(positions).to(self._device, non_blocking=True),
                torch.from_numpy(logits_indices).to(self._device, non_blocking=True),
            )
