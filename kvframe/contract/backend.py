"""The interface of a backend: capabilities as data, metadata built once a step, attention computed per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self

import attrs
import torch

from kvframe.contract.capabilities import Capabilities
from kvframe.contract.capture import GraphCapture
from kvframe.contract.choice import ChosenTokens
from kvframe.contract.entries import EntryStep
from kvframe.contract.growth import Growing
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder
from kvframe.contract.relative_bias import bias_by_distance
from kvframe.contract.slots import Slots
from kvframe.contract.specs import RELATIVE_BIAS, LayerSpec

KVCache = Mapping[str, torch.Tensor]
"""One layer's state tensors by name, each ``[num_block_ids, *StateTensor.shape], device``: strided views of the
pool."""


@attrs.frozen(kw_only=True, eq=False)
class MoreInputs:
    """What an attention call of some layers has beside a query and the cache (``AttentionBackend.attend``).

    Attributes:
        chosen: The tokens that are chosen for each query; None unless the layer's ``QuerySpec.choice`` asks for them.
        entries: The entries of the layer's type, by name (``KVCacheSpec.entries``): the backend writes those of the
            step's tokens, and reads them.
        inputs: The inputs of the layer's type, by name (``KVCacheSpec.inputs``), each ``[num_tokens, *shape], device``.
        key: The keys of the step's tokens, as ``write_kv`` got them, for types that store them in entries too; None if
            the layer does not store the step's tokens.
        value: The values, likewise.
    """

    chosen: ChosenTokens | None = None
    entries: Mapping[str, EntryStep] = MappingProxyType({})
    inputs: KVCache = MappingProxyType({})
    key: torch.Tensor | None = None
    value: torch.Tensor | None = None


class PageCopier(Protocol):
    """Copies whole pages of a device's memory, any number of them at once."""

    def __call__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_ids: torch.Tensor | None,
        target_ids: torch.Tensor | None,
        *,
        num_pages: int,
        page_bytes: int,
        id_bytes: int,
    ) -> None:
        """Copy pages byte by byte, to or from host memory, on the stream of the steps; does not wait.

        Args:
            source: ``[num_bytes], uint8, device``.
            target: ``[num_bytes], uint8, device``, apart from ``source``; written to.
            source_ids: ``[num_pages], int64, device``: page ``i`` begins ``source_ids[i] * id_bytes`` into ``source``.
                None if the pages lie side by side.
            target_ids: Likewise for ``target``.
            num_pages: How many pages to copy.
            page_bytes: Bytes of a page, a multiple of 8.
            id_bytes: Bytes from one id to the next, a multiple of 8.
        """


class AttentionMetadataBuilder(Growing, ABC):
    """Turns a step's batch metadata, after the wrappers, into what a backend's kernels read.

    The framework checks the lengths and block ids that a builder is given. It trusts those that the builder makes.

    Attributes:
        capture: For which batches the shapes of what it builds are known before it runs.
        batch_order: The order of requests that its input must have; None for any.
        on_host: The fields of the metadata whose values it reads on the host, such as ``{"block_table"}``; the fields
            with the suffix ``_cpu`` are always there. It then builds before the step's one copy to the device, which
            brings the tensors that it makes there. The other fields lie together, on the host or on the device: it
            hands them on, or computes with them by operations of torch. None if all have to lie on the device.
        needs_exact_lens: Whether it reads ``seq_lens_cpu`` or ``max_seq_len`` as exact lengths. Then it is not given a
            step that has only upper bounds of them.
        table_fields: The fields of the attrs value that it builds which depend on the block table or the slots. For
            another cache group with equal layers the framework replaces only these. None if everything is built anew.
    """

    capture: GraphCapture = GraphCapture.NEVER
    batch_order: BatchOrder | None = None
    on_host: frozenset[str] | None = None
    needs_exact_lens: bool = True
    table_fields: frozenset[str] | None = None

    @property
    def reuse_key(self) -> Hashable:
        """What the result of ``build`` depends on besides the batch metadata, within one backend with equal parameters.

        None, the default, stands for the layers' spec and query side. A builder that depends on less returns that, so
        that more layers share its metadata.
        """
        return None

    @abstractmethod
    def build(self, metadata: CommonAttentionMetadata) -> Any:
        """Return the backend's metadata. Called before any of the group's layers runs.

        It is called once a step for all attention groups with an equal ``reuse_key``, the same backend and the same
        wrapped metadata. A builder, and what it returns, keeps no tensor of the host's: neither the fields with the
        suffix ``_cpu`` nor those that ``on_host`` names, unless they are for ``finish`` or go to the device. A host may
        write the next step into the same memory when the metadata is built, so an equal ``id()`` does not mean an equal
        content.

        Args:
            metadata: The step's metadata after the group's wrapper chain. Never written to.
        """

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[Any]:
        """Return what each builder's ``build`` returns for its metadata. Called once a step for each class of builders.

        The default builds one after the other. A builder of many small operations can do them for all groups at once.

        Args:
            builds: Pairs of a builder and the metadata that it builds from, all of one step.
        """
        return [builder.build(metadata) for builder, metadata in builds]

    def finish(self, built: Any) -> Any:
        """Return what the layers read, made from the result of ``build``, whose tensors now lie on the device.

        Called once a step for each result of ``build``, before any of the group's layers runs: here a builder computes
        on the device from what the step's one copy brought there. The default changes nothing.

        Args:
            built: The result of ``build``. If the builder declares ``table_fields``, the returned value must have these
                fields and must not otherwise depend on them: the framework replaces them for other cache groups.
        """
        return built

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the ``table_fields`` of what ``build`` would return for ``metadata``, which is never written to.

        Args:
            built: The result of this builder, or of one with an equal ``reuse_key``, for metadata that differs from
                ``metadata`` only in the block table and the slots.
            metadata: The step's metadata after the group's wrapper chain.
        """
        raise NotImplementedError(f"{type(self).__name__} declares table_fields and does not refresh them")


class _PassThroughBuilder(AttentionMetadataBuilder):
    on_host = frozenset()

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        return metadata


class AttentionBackend(Growing, ABC):
    """Computes attention for the layers of one attention group. One class is enough for a simple backend.

    An instance is made at set-up for each attention group and lives as long as the engine.
    """

    capabilities: ClassVar[Capabilities]
    """What it can do. It is never given a layer that needs more."""
    options_class: ClassVar[type[Any] | None] = None
    """A frozen attrs class of the options that a stack may give the backend; None for none."""
    conformance_form: ClassVar[str | None] = None
    """Where the conformance kit finds a description of the state that it reads, as ``"module:StateForm"``; None for
    keys and values."""
    conformance_options: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Options that the conformance kit uses, if the default ones would compile something for each case."""

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return in one sentence why this backend cannot run in this environment; None if it can."""
        return None

    @classmethod
    def page_copier(cls) -> PageCopier | None:
        """Return a kernel that copies pages to and from host memory; None, the default, for a copy by torch.

        Called at set-up for each backend that serves a layer. The first kernel found copies the pages of all groups.
        """
        return None

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device, options: Any = None) -> None:
        """Take the group's layers, all with the same spec and query side.

        Args:
            layers: The layers that this instance serves, as their wrapper chain leaves them.
            device: Where their caches lie.
            options: An instance of ``options_class``; None if the class has none.
        """
        self.layers = tuple(layers)
        self.device = device
        self.options = options
        self.parameters: dict[str, Mapping[str, torch.Tensor]] = {}
        self.bias_tables: dict[str, torch.Tensor] = {}

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the learned tensors of one layer's attention. Called once for each layer that has any, at set-up.

        The default keeps them in ``parameters``, and a learned bias in ``bias_tables`` too, by distance: ``[num_heads,
        2 * max_distance + 1], device``, as ``bias_by_distance`` returns it, in float32 or the parameter's float64.

        Args:
            layer: The layer, as the group's wrapper chain leaves it.
            parameters: By name, such as ``relative_bias: [num_buckets, num_heads]``, device; not written to. Those of
                the spec's ``parameters`` are among them, in the shapes that it returns.
        """
        self.parameters[layer.name] = parameters
        bias = None if layer.query is None else layer.query.relative_bias
        if bias is not None:
            table = parameters[RELATIVE_BIAS]
            wide = torch.promote_types(table.dtype, torch.float32)
            self.bias_tables[layer.name] = bias_by_distance(bias, table.to(wide))

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return the group's metadata builder; the default passes the batch metadata on unchanged."""
        return _PassThroughBuilder()

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store new tokens' keys and values. Called before ``attend``, never for a layer that shares a cache.

        The default calls the ``write`` of the layers' format. If the type stores something else, ``key`` and ``value``
        are the two parts of that, as its spec describes.

        Args:
            key: ``[num_tokens, num_kv_heads, head_size], device``.
            value: ``[num_tokens, num_kv_heads, head_size_v], device``.
            kv_cache: The layer's state tensors; written to.
            slots: Where each token is stored, ``[num_tokens]``; one with a negative slot is not stored.
        """
        assert self.layers[0].spec is not None
        self.layers[0].spec.kv_format.write(key, value, kv_cache, slots)

    @abstractmethod
    def attend(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        more: MoreInputs | None = None,
    ) -> torch.Tensor:
        """Compute attention of the new tokens over the cache, their own keys included (already written).

        A backend takes the arguments by name that it serves, and the others as ``**_``. It gets ``sinks``, ``lse`` and
        ``more`` only for layers that need them, so only if it declares ``sinks``, ``returns_lse``, or ``choices`` or
        ``kinds``.

        Args:
            layer: The layer that runs, as the group's wrapper chain leaves it.
            query: ``[num_tokens, num_heads, head_size], device``.
            kv_cache: The state tensors of the layer, or of the layer whose cache it shares; not written to.
            metadata: What this backend's builder made for the step. If it holds the batch metadata, its tensors on the
                device are read, and not the copies on the host.
            sinks: ``[num_heads], device``: learned sink logits. None also for a layer with sinks if it is merged with
                other attention, which has them.
            out: Where the host wants the result, of its shape and dtype, contiguous, device; None if it wants a new
                tensor. A backend that can writes there and returns ``out``. If it returns another tensor, the host
                copies that.
            lse: ``[num_tokens, num_heads], device``, contiguous, in float32, or in float64 if the query has it: where
                the log-sum-exp of each query and head is written, for a layer whose output the model merges with other
                attention of the same queries (``QuerySpec.merged``, ``merge_attention``). It is the natural logarithm
                of the softmax's denominator, ``log(sum_t exp(s_t))`` over the tokens that the query sees; a score
                ``s_t`` includes the layer's scale, its soft cap and its bias, and a learned sink is one more term. It
                is ``-inf`` for a query that sees neither a key nor a sink. The rows of padded tokens are never used.
            more: For a layer whose query side has a ``choice``, or whose type defines its own attention.

        Returns:
            ``[num_tokens, num_heads, head_size_v], device``, in the query's dtype; zeros for a query that sees no key.
        """
