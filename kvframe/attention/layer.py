"""One attention layer at run time: stores the keys and values of a step in pages, and calls its backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs
import torch

from kvframe.attention.build import GroupMetadata, GroupStep
from kvframe.attention.entries import AttachedEntryLayer
from kvframe.attention.nested import replace_tensors
from kvframe.attention.returned import step_failure
from kvframe.contract.backend import KVCache, MoreInputs
from kvframe.contract.choice import ChosenTokens, find_chosen
from kvframe.contract.errors import BackendError, PluginError
from kvframe.contract.foreign import call
from kvframe.contract.formats import PLAIN
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.specs import LayerSpec
from kvframe.planning.answers import ask
from kvframe.planning.spec_check import QUERY


class AttentionLayer:
    """One attention layer on its backend: passes the calls on, and checks what the backend returns.

    Attributes:
        spec: The layer's spec.
        kv_cache: Its state tensors, or those of the layer whose cache it shares; empty if the host gives them with each
            call.
        step: What its group holds while a step runs.
        lacks_parameters: Whether it needs learned tensors that are not bound yet.
    """

    def __init__(
        self,
        spec: LayerSpec,
        kv_cache: KVCache,
        step: GroupStep,
        entries: Mapping[str, AttachedEntryLayer] = MappingProxyType({}),
    ) -> None:
        self.spec, self.kv_cache, self.step = spec, kv_cache, step
        group, cache_spec, query = step.group, spec.spec, spec.query
        assert cache_spec is not None
        assert query is not None
        self._entries = {name: entries[f"{spec.name}/{name}"] for name in cache_spec.entries}
        if self._entries and group.builder.batch_order is not None:
            raise BackendError(
                f"backend {group.backend_name!r}, of layer {spec.name!r}: it reads entries, and its builder asks for "
                "an order of requests, which entries do not have; leave its batch_order None"
            )
        self._wrapped = attrs.evolve(group.wrapped, name=spec.name, shares_with=spec.shares_with)
        self._backend, self._backend_name = group.backend, group.backend_name
        self._writes = spec.shares_with is None
        self._head_shape = _head_shape(self._wrapped)
        self._query_shape = query.num_heads, query.head_size
        self._stored_shapes = None if cache_spec.defines_attention else _stored_shapes(self._wrapped)
        self._inputs = ask(cache_spec, "inputs(query)", lambda: dict(cache_spec.inputs(query)))
        self._choice, self._merged = query.choice, query.merged
        self._has_more = query.choice is not None or cache_spec.defines_attention
        self._parameter_shapes = ask(cache_spec, "parameters(query)", lambda: dict(cache_spec.parameters(query)))
        self.lacks_parameters = bool(self._parameter_shapes)

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give the layer's learned tensors to its backend, once, before the first step.

        Args:
            parameters: By name, such as ``relative_bias: [num_buckets, num_heads]``, device.

        Raises:
            BackendError: A tensor that the layer needs is not among them, or has another shape; or the backend fails.
        """
        shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        for name, shape in self._parameter_shapes.items():
            if shapes.get(name) != shape:
                raise BackendError(
                    f"layer {self.spec.name!r} needs the learned tensor {name!r} of shape {shape}, and the model bound "
                    f"{shapes or 'none'}; bind it when the model is attached"
                )
        label = f"backend {self._backend_name!r}, of layer {self.spec.name!r}: bind()"
        try:
            call(label, self._backend.bind, self._wrapped, parameters, passes=(BackendError,))
        except PluginError as error:
            raise BackendError(str(error)) from error.__cause__
        self.lacks_parameters = False

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        *,
        chosen: ChosenTokens | None = None,
        inputs: KVCache | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store the step's keys and values, and attend.

        Args:
            query: ``[num_rows, num_heads, head_size], device``: the step's tokens; of a skipped layer, the kept ones.
            key: ``[num_stored, num_kv_heads, head_size], device``: of the step's tokens; of a layer that keeps state of
                an input sequence, of the tokens of the step's new inputs. Ignored by a layer that shares a cache, and
                in a step that stores nothing.
            value: ``[num_stored, num_kv_heads, head_size_v], device``; likewise.
            sinks: ``[num_heads], device``: learned sink logits; None unless the layer has them.
            chosen: The tokens that are chosen for each query; None unless the layer's query side has a ``choice``.
            inputs: The further inputs of the layer's type, by name; None for none.
            lse: ``[num_rows, num_heads], device``: where the log-sum-exp is written, in ``lse_dtype`` of the query's
                dtype; None unless the layer is merged.

        Returns:
            ``[num_rows, num_heads, head_size_v], device``.

        Raises:
            BackendError: As ``write`` and ``attend`` raise it; or the chosen tokens or the inputs are not those of the
                layer, or its query side does not say that it is merged (``wrong_input``).
        """
        if lse is not None and not self._merged:
            raise BackendError(
                f"layer {self.spec.name!r} is not specified as merged, so its backend may return no log-sum-exp",
                code="wrong_input",
            )
        step = self.step.read
        self.write(key, value, self.kv_cache, step)
        if self._has_more or chosen is not None or inputs is not None:
            more = self._more(chosen, inputs or {}, key, value, step)
            return self.attend(query, self.kv_cache, step, sinks, lse=lse, more=more)
        return self.attend(query, self.kv_cache, step, sinks, lse=lse)

    def write(
        self, key: torch.Tensor | None, value: torch.Tensor | None, kv_cache: KVCache, step: GroupMetadata
    ) -> None:
        """Store a step's keys and values, unless the layer shares a cache or the step stores nothing.

        Args:
            key: ``[num_stored, num_kv_heads, head_size], device``.
            value: ``[num_stored, num_kv_heads, head_size_v], device``.
            kv_cache: The layer's state tensors; written to.
            step: The step.

        Raises:
            BackendError: Keys or values have other shapes than the layer stores (``wrong_input``), or the backend
                raised something (``failed``).
        """
        if not self._writes or step.slots is None:
            return
        assert key is not None
        assert value is not None
        shapes, num_rows = self._stored_shapes, step.slots.flat.shape[0]
        if shapes is not None and (key.shape != (num_rows, *shapes[0]) or value.shape != (num_rows, *shapes[1])):
            raise self._wrong_input("keys and values", (key, value), [(num_rows, *shape) for shape in shapes])
        try:
            self._backend.write_kv(key, value, kv_cache, step.slots)
        except BaseException as error:
            raise self._failure("write_kv", error) from error

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: KVCache,
        step: GroupMetadata,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
        *,
        lse: torch.Tensor | None = None,
        more: MoreInputs | None = None,
    ) -> torch.Tensor:
        """Compute a step's attention.

        Args:
            query: ``[num_rows, num_heads, head_size], device``.
            kv_cache: The state tensors of the layer, or of the layer whose cache it shares.
            step: The step.
            sinks: ``[num_heads], device``: learned sink logits; None unless the layer has them.
            out: Where the result has to be, contiguous, in the query's dtype; None for a new tensor.
            lse: Where the log-sum-exp is written, as the backend takes it; None unless the layer is merged.
            more: Chosen tokens, further entries and inputs, in the order of the backend's rows; None for none.

        Returns:
            ``[num_rows, num_heads, head_size_v], device``: ``out`` if it is given.

        Raises:
            BackendError: The query has another number of rows than the layer's wrapper chain leaves; or the query, the
                sinks or ``out`` have other shapes than the layer (``wrong_input``); or the backend raised something
                (``failed``), or returned something else than was agreed (``wrong_output``).
        """
        if query.shape != (step.num_rows, *self._query_shape):
            raise self._wrong_query(query, step.num_rows)
        if sinks is not None or out is not None:
            self._check_sinks_and_out(query, sinks, out)
        order, target = step.permutation, out
        if order is not None:
            query, target = query.index_select(0, order.tokens), None
        try:
            output = self._backend.attend(
                self._wrapped, query, kv_cache, step.metadata, sinks=sinks, out=target, lse=lse, more=more
            )
        except BaseException as error:
            raise self._failure("attend", error) from error
        if (
            getattr(output, "shape", None) != (query.shape[0], *self._head_shape)
            or output.dtype != query.dtype
            or output.device != query.device
        ):
            self._check_output(output, query)
        if order is not None:
            output = torch.index_select(output, 0, order.inverse, out=out)
            if lse is not None:
                lse.copy_(lse.index_select(0, order.inverse))
        return output if out is None or output is out else out.copy_(output)

    def _more(
        self,
        chosen: ChosenTokens | None,
        inputs: KVCache,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        step: GroupMetadata,
    ) -> MoreInputs:
        """Return what the layer's call has beside a query and a cache, in the order of the backend's rows.

        Raises:
            BackendError: The chosen tokens or the inputs are not those of the layer (``wrong_input``).
        """
        self._check_more(chosen, inputs, step.num_rows)
        if (order := step.permutation) is not None:
            chosen = None if chosen is None else chosen.rows(lambda rows: rows[order.tokens])
            inputs = {name: tensor.index_select(0, order.tokens) for name, tensor in inputs.items()}
            key, value = (
                None if new_tensor is None else new_tensor.index_select(0, order.tokens) for new_tensor in (key, value)
            )
        entries = {name: entry.step for name, entry in self._entries.items()}
        return MoreInputs(chosen=chosen, entries=entries, inputs=inputs, key=key, value=value)

    def _check_more(self, chosen: ChosenTokens | None, inputs: KVCache, num_rows: int) -> None:
        """Raise ``BackendError`` if chosen tokens or inputs are not what the layer is specified with."""
        choice = self._choice
        if choice is not None or chosen is not None:
            form = None if choice is None else (num_rows, choice.num_choosers, choice.max_chosen, choice.block_size)
            sizes = None if chosen is None else (*chosen.indices.shape, chosen.block_size)
            if form is None or sizes is None or sizes[:2] != form[:2] or sizes[2] > form[2] or sizes[3] != form[3]:
                raise BackendError(
                    f"layer {self.spec.name!r} was called with "
                    f"{'no choice' if sizes is None else f'choices {list(sizes[:3])} of blocks of {sizes[3]}'}, and it "
                    f"is specified with {'none' if form is None else f'{list(form[:3])} of blocks of {form[3]}'}",
                    code="wrong_input",
                )
        if chosen is not None and self.step.audited is not None:
            self._audit_choice(chosen, self.step.audited)
        expected_shapes = {name: (num_rows, *shape) for name, shape in self._inputs.items()}
        shapes = {name: tuple(tensor.shape) for name, tensor in inputs.items()}
        if shapes != expected_shapes:
            raise BackendError(
                f"layer {self.spec.name!r} was called with the inputs {shapes or 'none'}, and it is specified with "
                f"{expected_shapes or 'none'}",
                code="wrong_input",
            )

    def _audit_choice(self, chosen: ChosenTokens, metadata: CommonAttentionMetadata) -> None:
        """Raise ``BackendError`` for a chosen token that is not live, or later than its query."""
        spec = self.spec.spec
        assert spec is not None
        assert spec.mask_function is not None
        on_host = ChosenTokens(chosen.indices.cpu(), chosen.block_size)
        is_seen = find_chosen(on_host, replace_tensors(metadata, lambda tensor: tensor.cpu()), spec.mask_function).seen
        # Of a chosen block, its first token is live.
        first_tokens = on_host.indices.long() * chosen.block_size
        beyond = torch.nonzero((first_tokens >= 0) & ~is_seen[..., :: chosen.block_size])
        if len(beyond):
            row, chooser, index = beyond[0].tolist()
            raise BackendError(
                f"layer {self.spec.name!r} was called with a choice of the token "
                f"{int(first_tokens[row, chooser, index])} for the query in row {row}, which does not see that token: "
                "choose among the live tokens up to the query",
                code="wrong_input",
            )

    def _check_sinks_and_out(self, query: torch.Tensor, sinks: torch.Tensor | None, out: torch.Tensor | None) -> None:
        if sinks is not None and sinks.shape != self._query_shape[:1]:
            raise self._wrong_input("sinks", (sinks,), [self._query_shape[:1]])
        if out is not None and not (out.dtype == query.dtype and out.is_contiguous()):
            raise BackendError(
                f"layer {self.spec.name!r} was given memory for its output of {out.dtype} with the strides "
                f"{out.stride()}; it has to be contiguous and of the query's dtype, {query.dtype}",
                code="wrong_input",
            )

    def _wrong_query(self, query: torch.Tensor, num_rows: int) -> BackendError:
        if query.shape[0] == num_rows:
            return self._wrong_input("queries", (query,), [(num_rows, *self._query_shape)])
        return BackendError(
            f"layer {self.spec.name!r} was called with {query.shape[0]} query rows, and its wrapper chain leaves "
            f"{num_rows} in this step; a model that skips rows takes them from kept_rows"
        )

    def _wrong_input(
        self, label: str, tensors: Sequence[torch.Tensor], expected: Sequence[tuple[int, ...]]
    ) -> BackendError:
        shapes_text, expected_text = (
            " and ".join(str([*shape]) for shape in shapes)
            for shapes in ([tensor.shape for tensor in tensors], expected)
        )
        return BackendError(
            f"layer {self.spec.name!r} was called with {label} of {shapes_text}, and it is specified with "
            f"{expected_text}",
            code="wrong_input",
        )

    def _failure(self, method: str, error: BaseException) -> BaseException:
        return step_failure(self._backend_name, [self.spec.name], method, error)

    def _check_output(self, output: Any, query: torch.Tensor) -> None:
        """Raise ``BackendError`` if a backend's output is not what was agreed."""
        expected = [query.shape[0], *self._head_shape]
        is_tensor = isinstance(output, torch.Tensor)
        if is_tensor and self._head_shape[1] is None and output.ndim == 3:
            # If the state is not keys and values, only the backend and the model know the size of a value.
            expected[2] = output.shape[2]
        if (
            is_tensor
            and list(output.shape) == expected
            and (output.dtype, output.device) == (query.dtype, query.device)
        ):
            return
        description = f"a {type(output).__name__!r}"
        if is_tensor:
            description = f"a tensor {list(output.shape)} of {output.dtype} on {output.device}"
        raise BackendError(
            f"backend {self._backend_name!r} returned {description} for layer {self.spec.name!r}, and not a "
            f"tensor {expected} of {query.dtype} on {query.device}: this is a mistake in the backend's attend",
            code="wrong_output",
        )


class QueryStoringLayer(AttentionLayer):
    """A layer whose type has an entry of queries, for its choice of the tokens that it keeps of a prompt."""

    def __call__(self, query: torch.Tensor, *tensors: torch.Tensor | None, **keywords: Any) -> torch.Tensor:
        """Store the step's queries, and attend."""
        self._entries[QUERY].step.write(query=query)
        return super().__call__(query, *tensors, **keywords)


def stores_queries(layer: LayerSpec) -> bool:
    """Return whether a layer's type has the entry of queries that the host stores."""
    return layer.spec is not None and layer.spec.prompt_budget is not None and QUERY in layer.spec.entries


def _head_shape(layer: LayerSpec) -> tuple[int, int | None]:
    """Return heads and their size in what a backend gives for a layer; None for a size that its state does not say."""
    assert layer.query is not None
    assert layer.spec is not None
    value = layer.spec.in_format(PLAIN).state_tensors().get("v")
    return layer.query.num_heads, None if value is None else value.shape[-1]


def _stored_shapes(layer: LayerSpec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return heads and their sizes of keys and of values; None if the layer stores something else."""
    assert layer.spec is not None
    state = layer.spec.in_format(PLAIN).state_tensors()
    return (state["k"].shape[1:], state["v"].shape[1:]) if state.keys() == {"k", "v"} else None
