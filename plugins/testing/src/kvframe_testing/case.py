"""A conformance case: one step of one layer, as plain values, and its random inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch

from kvframe.contract.formats import PLAIN, KVFormat
from kvframe.contract.slots import Slots
from kvframe.contract.specs import RELATIVE_BIAS, KVCacheSpec, LayerSpec, QuerySpec
from kvframe.selection.choice import WrapperChain
from kvframe_testing.state import KEYS_AND_VALUES, StateForm

_SPREAD = 1.5


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
    def range_ends(self) -> list[int]:
        """Where the range of each new token ends; 0 for none."""
        positions = range(self.num_computed, self.num_computed + self.num_new)
        return [max((stop for start, stop in self.ranges if start <= n < stop), default=0) for n in positions]

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
        padded_rows = torch.full((len(rows), choice.max_chosen), -1)
        for row, drawn_numbers in zip(padded_rows, rows, strict=True):
            row[: len(drawn_numbers)] = drawn_numbers
        return padded_rows.clamp(min=-1).view(request.num_new, choice.num_choosers, -1).int()

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


# --- inputs ----------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """One request's tensors on the host, in the dtype that a model computes in.

    Attributes:
        query: ``[num_new, num_heads, head_size]``.
        key: ``[seq_len, …]``: the ``key`` that ``write_kv`` takes, in the case's form.
        value: ``[seq_len, …]``: likewise.
        read_key: ``[seq_len, …]``: the key after the layer's format stored and read it; equal for the plain format.
        read_value: ``[seq_len, …]``: likewise.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    read_key: torch.Tensor
    read_value: torch.Tensor


@attrs.frozen(kw_only=True, eq=False)
class Learned:
    """The layer's learned tensors on the host, in the dtype that a model computes in.

    Attributes:
        sinks: ``[num_heads]``: sink logits; None if there are none.
        parameters: The parameters that the backend gets with ``bind``, by name.
    """

    sinks: torch.Tensor | None
    parameters: Mapping[str, torch.Tensor]

    @classmethod
    def draw(cls, case: Case, generator: torch.Generator) -> Learned:
        """Return tensors drawn at random."""
        query = case.query

        def draw(*shape: int) -> torch.Tensor:
            return _SPREAD * torch.randn(*shape, generator=generator).to(case.query_dtype)

        sinks = draw(query.num_heads) if query.has_sinks else None
        parameters = case.form.draw_parameters(case.layer, draw)
        if query.relative_bias is not None:
            parameters[RELATIVE_BIAS] = draw(query.relative_bias.num_buckets, query.num_heads)
        return cls(sinks=sinks, parameters=parameters)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [*([] if self.sinks is None else [self.sinks]), *self.parameters.values()]

    def without_sinks(self) -> Learned:
        """Return the tensors that a part of the keys is attended to with if another part has the sinks."""
        return Learned(sinks=None, parameters=self.parameters)

    def to(self, target: torch.device | torch.dtype) -> Learned:
        """Return the tensors on another device or in another dtype."""
        return Learned(
            sinks=None if self.sinks is None else self.sinks.to(target),
            parameters={name: tensor.to(target) for name, tensor in self.parameters.items()},
        )


def draw_inputs(case: Case, generator: torch.Generator) -> list[Inputs]:
    """Return random tensors for each request, rounded to the precision that the cache stores."""
    query = case.query

    def draw(*shape: int) -> torch.Tensor:
        return _SPREAD * torch.randn(*shape, generator=generator)

    inputs = []
    for request in case.requests:
        queries = draw(request.num_new, query.num_heads, query.head_size).to(case.query_dtype)
        key, value = case.form.draw(case.spec, request.seq_len, lambda *shape: draw(*shape).to(case.stored_dtype))
        if case.shift:
            size = (abs(case.shift) / query.scale) ** 0.5
            queries[..., 0], key[..., 0] = math.copysign(size, case.shift), size
        key, value = read_key, read_value = key.to(case.query_dtype), value.to(case.query_dtype)
        if case.spec.kv_format != PLAIN:
            # After one round trip, values are far from the border to the next code. A kernel that rounds a division
            # otherwise then stores the same codes.
            key, value = (tensor.to(case.query_dtype) for tensor in round_trip(case.spec.kv_format, key, value))
            read_key, read_value = round_trip(case.spec.kv_format, key, value)
        inputs.append(Inputs(query=queries, key=key, value=value, read_key=read_key, read_value=read_value))
    return inputs


def round_trip(kv_format: KVFormat, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens' keys and values after a format stored and read them once, in float32.

    Args:
        kv_format: The format.
        key: ``[num_tokens, num_kv_heads, head_size], host``.
        value: ``[num_tokens, num_kv_heads, head_size_v], host``.
    """
    num_tokens, num_heads = key.shape[:2]
    state = kv_format.state_tensors(1, num_heads, key.shape[2], value.shape[2], "float32")
    cache = {
        name: torch.zeros(num_tokens, *tensor.shape, dtype=getattr(torch, tensor.dtype))
        for name, tensor in state.items()
    }
    tokens = torch.arange(num_tokens)
    kv_format.write(key, value, cache, Slots(tokens, 1))
    out = {"k": torch.empty(num_tokens, 1, *key.shape[1:]), "v": torch.empty(num_tokens, 1, *value.shape[1:])}
    kv_format.read(cache, tokens, out)
    return out["k"].squeeze(1), out["v"].squeeze(1)
