"""A conformance case: one step of one layer, as plain values."""

from __future__ import annotations

import attrs
import torch

from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import KVCacheSpec, LayerSpec, QuerySpec
from kvframe.contract.wrapper import CHANGES_MASK
from kvframe.selection.chains import WrapperChain
from kvframe.testing.state import KEYS_AND_VALUES, StateForm


@attrs.frozen
class Request:
    """One request's part in a step.

    Attributes:
        num_computed: Tokens whose state is in the cache.
        num_new: Tokens that the step computes.
        num_generating: How many of these generate, counted from the last one: one for a prefill that completes its
            prompt, none for one that does not, all for a decode with draft tokens.
        num_hidden: Cached tokens at its start that its queries do not see (``SEQ_STARTS``).
        num_keys: Tokens of another sequence, all in the cache, that its queries attend to instead of their own tokens;
            None if they attend to their own. Either all requests of a step have it, or none.
        ranges: Ranges of its new tokens that see each other in both directions (``RANGE_ENDS``).
    """

    num_computed: int
    num_new: int
    num_generating: int = 1
    num_hidden: int = 0
    num_keys: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def seq_len(self) -> int:
        """Tokens, after the step, of the sequence that its queries attend to."""
        return self.num_computed + self.num_new if self.num_keys is None else self.num_keys

    @property
    def num_cached(self) -> int:
        """The number of these tokens that are in the cache before the step."""
        return self.num_computed if self.num_keys is None else self.num_keys


@attrs.frozen(kw_only=True)
class Case:
    """One step of one layer.

    Attributes:
        name: The tested properties (``"window=5-block=16-decode"``).
        layer: The layer, as the model has it; its spec stores the state of ``form``.
        requests: The batch.
        causal: The batch's ``causal``.
        num_padding: Padded requests, tokens and generating rows after the batch, which then has ``static_shapes``.
        wrappers: The layer's wrapper chain, as a stack gives it.
        form: The form of the stored state.
        shift: What is added to all scores of a query, by one element of it and of each key.
    """

    name: str
    layer: LayerSpec
    requests: tuple[Request, ...]
    causal: bool = True
    num_padding: int = 0
    wrappers: WrapperChain = ()
    form: StateForm = KEYS_AND_VALUES
    shift: float = 0.0

    @property
    def is_cross(self) -> bool:
        """Whether the keys are of another sequence than the queries."""
        return self.requests[0].num_keys is not None

    @property
    def spec(self) -> KVCacheSpec:
        """The layer's cache spec."""
        assert self.layer.spec is not None
        return self.layer.spec

    @property
    def attended_spec(self) -> KVCacheSpec:
        """The spec of the mask: the layer's own, or that of the last wrapper that changes masks."""
        layer, found = self.layer, self.spec
        for wrapper in self.wrappers:
            bound = wrapper.for_layer(layer)
            layer = bound.wrapped_layer(layer)
            if CHANGES_MASK in bound.effects and layer.spec is not None:
                found = layer.spec
        return found

    @property
    def query(self) -> QuerySpec:
        """The layer's query side."""
        assert self.layer.query is not None
        return self.layer.query

    def chosen(self, index: int) -> torch.Tensor:
        """Return what a layer with a choice reads of a request: random tokens, or blocks, of it and a few later ones.

        Args:
            index: The request.

        Returns:
            ``[num_new, num_choosers, max_chosen], int32, host``; -1 for none. It is the same in each call.
        """
        choice, request = self.query.choice, self.requests[index]
        assert choice is not None
        generator = torch.Generator().manual_seed(index)
        # Numbers from -1 down stand for none; the last ones are later than every query.
        candidates = torch.arange(-2, -(-request.seq_len // choice.block_size) + 2)
        rows = [
            candidates[torch.randperm(len(candidates), generator=generator)][: choice.max_chosen]
            for _ in range(request.num_new * choice.num_choosers)
        ]
        drawn = torch.full((len(rows), choice.max_chosen), -1)
        for row, chosen in zip(drawn, rows, strict=True):
            row[: len(chosen)] = chosen
        return drawn.clamp(min=-1).view(request.num_new, choice.num_choosers, -1).int()

    @property
    def stored_dtype(self) -> torch.dtype:
        """The cache's dtype; for a layer in another format than the plain one, the dtype in which it is read."""
        state = self.spec.in_format(PLAIN).state_tensors()
        dtype: torch.dtype = getattr(torch, next(iter(state.values())).dtype)
        return dtype

    @property
    def query_dtype(self) -> torch.dtype:
        """The cache's dtype if models compute in it, otherwise bfloat16."""
        return self.stored_dtype if self.stored_dtype.itemsize > 1 else torch.bfloat16
