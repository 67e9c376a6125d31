"""A whole host in one file: it serves prompts with a paged cache, prefix hits and one batch for all requests.

    python examples/write_a_host.py [MODEL]

It decodes greedily and does not preempt: a request that finds no pages waits until others have ended.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from kvframe import KVCacheManager, KVCacheStorage, Stack, StepBatch, load_model


@attrs.define(eq=False)
class Request:
    """A request: its tokens, and how many of them the cache holds.

    Attributes:
        name: Its name for the cache manager.
        token_ids: Its prompt, and then what was generated.
        max_len: The number of tokens at which it ends.
        num_computed: The number of tokens whose state is in the cache.
        num_hit: The number of tokens that were found in the cache when it started.
    """

    name: str
    token_ids: array[int]
    max_len: int
    num_computed: int = 0
    num_hit: int = 0


class Host:
    """Serves one model. Between steps, the cache holds exactly the state of ``num_computed`` tokens of each request."""

    def __init__(self, path: str, stack: Stack) -> None:
        """Load the model at a path, plan and allocate its cache, and attach the model to its attention layers."""
        self.model, setup = load_model(path, stack)
        self.max_num_tokens = setup.stack.limits.max_num_batched_tokens
        self.device = torch.device(setup.stack.model.device)
        storage = KVCacheStorage(setup.plan, setup.grouping, self.device)
        self.manager = KVCacheManager(
            setup.plan,
            max_num_seqs=setup.stack.limits.max_num_seqs,
            prefix_caching=not setup.grouping.whole_prompts,
            copier=storage.copy_pages,
        )
        self.layers = setup.make_layers(storage.views)
        self.model.attach(self.layers)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Request]:
        """Serve prompts of token ids to their ends, and return their requests in the same order."""
        requests = [
            Request(str(index), array("I", prompt), len(prompt) + max_new_tokens)
            for index, prompt in enumerate(prompts)
        ]
        self.waiting.extend(requests)
        while self.waiting or self.running:
            self.step()
        return requests

    def step(self) -> None:
        """Compute the next tokens of all running requests, and the prompts of those that can start."""
        self.admit()
        budget, requests = self.max_num_tokens, []
        for request in self.running:
            num_new = min(budget, len(request.token_ids) - request.num_computed)
            if num_new and self.manager.extend(request.name, request.num_computed + num_new):
                requests.append((request, num_new))
                budget -= num_new
        if not requests:
            raise MemoryError("the cache is too small for the running requests; give it more memory")
        next_ids = self.compute(requests)
        for (request, num_new), token_id in zip(requests, next_ids, strict=True):
            request.num_computed += num_new
            if request.num_computed == len(request.token_ids):  # otherwise its prompt goes on in the next step
                request.token_ids.append(token_id)
            self.manager.commit(request.name, request.token_ids, request.num_computed)
            if len(request.token_ids) == request.max_len:
                self.manager.free(request.name)
                self.running.remove(request)

    def admit(self) -> None:
        """Start the requests for which there are a row and enough pages; each begins with the prefix that is cached."""
        while self.waiting and self.manager.num_free_rows:
            request = self.waiting[0]
            request.num_hit = request.num_computed = self.manager.start(request.name, request.token_ids)
            if self.running and not self.manager.has_capacity(request.name, request.max_len):
                self.manager.free(request.name)
                return
            self.running.append(self.waiting.popleft())

    def compute(self, requests: Sequence[tuple[Request, int]]) -> list[int]:
        """Run the model once over the next ``num_new`` tokens of each request, packed; return their next token ids."""
        query_lens = np.array([num_new for _, num_new in requests])
        batch = StepBatch(
            rows=np.array([self.manager.row(request.name) for request, _ in requests]),
            num_computed=np.array([request.num_computed for request, _ in requests]),
            query_lens=query_lens,
            generating_indices=np.cumsum(query_lens) - 1,
        )
        token_ids = np.concatenate(
            [request.token_ids[request.num_computed : request.num_computed + num_new] for request, num_new in requests]
        ).astype(np.int64)
        metadata = self.layers.build_metadata(batch, self.manager.tables)
        inputs = (token_ids, batch.token_positions[1], batch.generating_indices)
        with torch.inference_mode():
            tensors = tuple(map(torch.from_numpy, inputs))
            step = self.layers.begin_step(metadata, batch=batch, tables=self.manager.tables, inputs=tensors)
            return self.model.forward(*step.inputs).argmax(-1).tolist()


def main() -> None:
    """Serve three prompts with a common beginning, twice: the second time they are found in the cache."""
    path = sys.argv[1] if len(sys.argv) > 1 else ".cache/demo-model"
    host = Host(path, Stack.from_mapping({"cache": {"memory": "16MiB"}}))
    prompts = [[*range(5, 45), index] for index in range(3)]
    first, again = (host.generate(prompts, max_new_tokens=8) for _ in range(2))
    assert [request.token_ids for request in first] == [request.token_ids for request in again]
    for request in again:
        print(f"request {request.name}: {request.num_hit} tokens found, then {list(request.token_ids[-8:])}")


if __name__ == "__main__":
    main()
