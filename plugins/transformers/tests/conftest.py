"""A stand-in for the engine's attention layers, dense and with plain masks, for the adapter's tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch
from kvframe_testing.framework import state_step

from kvframe.contract import (
    AttachedEntry,
    KVCacheSpec,
    LayerDescription,
    LoadedModel,
    StateStep,
    StateTensor,
    TokenRange,
)


class OneState(KVCacheSpec):
    """A state per request, in a block of its own."""

    kind = "one_state"

    def live_ranges(self, n: int) -> tuple[TokenRange, ...]:
        return ((n - 1, n),) if n else ()

    def state_tensors(self) -> Mapping[str, StateTensor]:
        return {}


class DenseState:
    """One state layer: request ``r`` has page ``r + 1``."""

    def __init__(self, description: LayerDescription) -> None:
        self.pages = {}
        for kind in ("conv", "recurrent"):
            shapes, dtypes = (description.options.get(f"{kind}_{what}", ()) for what in ("shapes", "dtypes"))
            for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
                dtype = getattr(torch, dtype.replace("auto", "float32"))
                self.pages[f"{kind}_{index}"] = torch.full((9, 1, *shape), torch.nan, dtype=dtype)
        self.step = StateStep((), ())


class DenseLayer:
    """One layer. Its keys and values are kept per request, as plain tensors."""

    def __init__(self, description: LayerDescription, layers: DenseLayers) -> None:
        self.description = description
        self.layers = layers
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.parameters: Mapping[str, torch.Tensor] = {}

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.parameters = parameters

    def expanded(self, latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values that latents stand for."""
        both = torch.einsum("til,hdl->thd", latents, self.parameters["kv_up"])
        nope, values = both.tensor_split([both.shape[-1] - self.description.options["head_size_v"]], dim=-1)
        return torch.cat((nope, rotated.expand(-1, nope.shape[1], -1)), -1), values

    def __call__(self, query, key, value, sinks=None):
        query_spec, shares_with = self.description.query, self.description.shares_with
        assert (sinks is not None) == query_spec["has_sinks"]
        outs, start = [], 0
        rows = self.layers.rows_of(self.description.name)
        assert len(rows) == len(query)
        for request, count in self.layers.batch:
            new, is_own = slice(start, start + count), (rows >= start) & (rows < start + count)
            start += count
            if shares_with is None:
                old = self.cache.get(request, (key[:0], value[:0]))
                self.cache[request] = torch.cat((old[0], key[new])), torch.cat((old[1], value[new]))
            cache = self.cache if shares_with is None else self.layers[shares_with].cache
            keys, values = cache[request]
            if self.description.kind == "mla":
                assert (1, 1) == (keys.shape[1], values.shape[1])
                keys, values = self.expanded(keys, values)
            total, repeat = len(keys), query_spec["num_heads"] // keys.shape[1]
            scores = (
                torch.einsum("thd,shd->hts", query[is_own], keys.repeat_interleave(repeat, 1)) * query_spec["scale"]
            )
            if query_spec["soft_cap"] is not None:
                scores = query_spec["soft_cap"] * torch.tanh(scores / query_spec["soft_cap"])
            positions, past = (rows[is_own] + total - start)[:, None], torch.arange(total)[None]
            visible = (past <= positions) | (self.description.kind == "encoder_only")
            if "lookahead" in self.description.options:
                visible &= past <= positions + self.description.options["lookahead"]
            if "window" in self.description.options:
                visible &= past > positions - self.description.options["window"]
            if "chunk" in self.description.options:
                visible &= past >= positions - positions % self.description.options["chunk"]
            scores = scores.masked_fill(~visible, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(positions), 1)), -1)
            weights = scores.softmax(-1)[..., :total]
            outs.append(torch.einsum("hts,shd->thd", weights, values.repeat_interleave(repeat, 1)))
        return torch.cat(outs)


class DenseLayers(Mapping[str, DenseLayer]):
    """All layers of a model, and the running batch: (request, new tokens) in packed order."""

    def __init__(self, descriptions: Sequence[LayerDescription]) -> None:
        self.batch: list[tuple[int, int]] = []
        self.skipped: tuple[str, ...] = ()
        self.kept_rows: torch.Tensor | None = None
        self.dtypes = frozenset({torch.float32})
        self._layers = {
            description.name: DenseLayer(description, self) for description in descriptions if description.query
        }
        self.states = {
            description.name: DenseState(description) for description in descriptions if not description.query
        }
        self.entries: Mapping[str, AttachedEntry] = {}
        self._lengths: dict[int, int] = {}

    def __getitem__(self, name: str) -> DenseLayer:
        return self._layers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)

    def rows_of(self, name: str) -> torch.Tensor:
        """Return the rows of the packed batch that a layer computes."""
        if name in self.skipped and self.kept_rows is not None:
            return self.kept_rows
        return torch.arange(sum(count for _, count in self.batch))

    def step(self, model: LoadedModel, new_tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run the new tokens of each request in one packed batch; return the logits of all of them, per request."""
        logits = self.run_batch(model, new_tokens)
        return dict(zip(new_tokens, logits.split([count for _, count in self.batch]), strict=True))

    def run_batch(
        self, model: LoadedModel, new_tokens: Mapping[int, Sequence[int]], kept_rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Run the new tokens of each request in one packed batch; return the logits of the kept rows."""
        self.kept_rows = None if kept_rows is None else torch.tensor(kept_rows)
        self.batch = [(request, len(tokens)) for request, tokens in new_tokens.items()]
        ids = torch.tensor([token for tokens in new_tokens.values() for token in tokens])
        starts = {request: self._lengths.get(request, 0) for request in new_tokens}
        positions = torch.cat(
            [torch.arange(starts[request], starts[request] + len(new_tokens[request])) for request in new_tokens]
        )
        step = state_step(
            np.array(list(new_tokens)),
            np.array(list(starts.values())),
            np.array([len(tokens) for tokens in new_tokens.values()]),
            np.arange(1, 9, dtype=np.int32)[:, None],
            OneState(block_size=1 << 20),
            torch.device("cpu"),
        )
        for state in self.states.values():
            state.step = step
        logits = model.forward(ids, positions, torch.arange(len(ids)))
        for request, tokens in new_tokens.items():
            self._lengths[request] = starts[request] + len(tokens)
        return logits

    def run_packed(
        self, model: LoadedModel, prompts: Sequence[Sequence[int]], last_only: bool = False
    ) -> list[torch.Tensor]:
        """Run whole prompts in one batch, as new requests; return the logits of each, or of its last row."""
        for layer in self.values():
            layer.cache.clear()
        self._lengths.clear()
        new_tokens = dict(enumerate(prompts))
        if not last_only:
            return list(self.step(model, new_tokens).values())
        ends = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        return list(self.run_batch(model, new_tokens, ends.tolist()).split(1))


@pytest.fixture
def dense_layers() -> type[DenseLayers]:
    return DenseLayers
