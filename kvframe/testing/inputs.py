"""The random inputs of a case: queries, keys, values and learned tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs
import torch

from kvframe.contract.formats import PLAIN
from kvframe.contract.specs import RELATIVE_BIAS
from kvframe.testing.case import Case
from kvframe.testing.formats import round_trip

_SPREAD = 1.5


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
        wanted = draw(request.num_new, query.num_heads, query.head_size).to(case.query_dtype)
        key, value = case.form.draw(case.spec, request.seq_len, lambda *shape: draw(*shape).to(case.stored_dtype))
        if case.shift:
            size = (abs(case.shift) / query.scale) ** 0.5
            wanted[..., 0], key[..., 0] = math.copysign(size, case.shift), size
        key, value = read_key, read_value = key.to(case.query_dtype), value.to(case.query_dtype)
        if case.spec.kv_format != PLAIN:
            # After one round trip, values are far from the border to the next code. A kernel that rounds a division
            # otherwise then stores the same codes.
            key, value = (each.to(case.query_dtype) for each in round_trip(case.spec.kv_format, key, value))
            read_key, read_value = round_trip(case.spec.kv_format, key, value)
        inputs.append(Inputs(query=wanted, key=key, value=value, read_key=read_key, read_value=read_value))
    return inputs
