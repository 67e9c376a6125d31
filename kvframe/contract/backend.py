"""The interface of a backend: capabilities as data, metadata built once a step, attention computed per layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, Self

import attrs
import torch

from kvframe.contract import declared_words
from kvframe.contract.capture import GraphCapture
from kvframe.contract.errors import BackendError
from kvframe.contract.formats import PLAIN
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.order import BatchOrder
from kvframe.contract.slots import Slots
from kvframe.contract.specs import TOKENS, LayerSpec

KVCache = Mapping[str, torch.Tensor]
"""One layer's state tensors by name, each ``[num_block_ids, *StateTensor.shape], device``: strided views of the
pool."""


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
        """Copy pages byte by byte. Called while requests are swapped, on the stream of the steps; does not wait.

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


@attrs.frozen
class Refusal:
    """Why a backend cannot serve a layer.

    Attributes:
        code: Stable ``snake_case`` code (``"mask_window"``).
        reason: The sentence for a person.
    """

    code: str
    reason: str


@attrs.frozen(kw_only=True)
class Capabilities:
    """What a backend can do, as data. Every value is checked when it is given; a wrong one raises ``BackendError``.

    Attributes:
        devices: Device types by torch's name (``"cpu"``, ``"cuda"``), without index.
        dtypes: Cache and query dtypes by torch's name.
        masks: Mask features: ``causal``, ``bidirectional``, ``window``, ``sink_tokens``, ``chunk``; ``mask_function``
            for every mask that ``KVCacheSpec.mask_function`` describes; ``live_range`` for every mask at all, derived
            from ``KVCacheSpec.live_ranges``; ``sparse`` for ``KVCacheSpec.mask_function`` also where a query sees fewer
            tokens than are live.
        extensions: Extensions of the batch metadata that it supports (``{"seq_starts"}``).
        state: Names of the state tensors that it reads in the plain format (``{"k", "v"}``).
        formats: Formats of stored keys and values that it reads and writes itself.
        takes_copies: Whether it may be given copies of a step's pages, with a block table of their own, instead of the
            pool. So it serves keys and values of any format: the format converts them into the copies.
        reads_dead_tokens: Whether it also reads tokens before the window, with a weight of zero, if their page holds
            live tokens. They are the request's own, so they are finite if the model's keys and values are.
        soft_cap: Whether it supports a soft cap on the scores.
        sinks: Whether it supports learned sink logits.
        relative_bias: Whether it supports a learned bias by distance.
        head_sizes: The head sizes that it supports; None for all.
        separate_value_size: Whether value vectors may differ in size from key vectors.
        returns_lse: Whether it has ``forward_with_lse``, whose results ``merge_attention`` merges.
        block_size_multiple: The block size must be a multiple of this.
        spec_sizes: For fields of specs, the values that it supports (``{"latent_size": frozenset({512})}``).
            Another value is refused with the field's name as the code. A field that is not listed may have any value.
        preference: If several backends can serve a layer, ``backend = "auto"`` takes the one with the highest.
    """

    devices: frozenset[str] = attrs.field(converter=declared_words.as_set, validator=declared_words.known_devices)
    dtypes: frozenset[str] = attrs.field(converter=declared_words.as_set, validator=declared_words.known_dtypes)
    masks: frozenset[str] = attrs.field(converter=declared_words.as_set, validator=declared_words.known_masks)
    extensions: frozenset[str] = attrs.field(
        default=frozenset(), converter=declared_words.as_set, validator=declared_words.extension_names
    )
    state: frozenset[str] = attrs.field(
        default=frozenset({"k", "v"}), converter=declared_words.as_set, validator=declared_words.names
    )
    formats: frozenset[str] = attrs.field(
        default=frozenset({PLAIN.name}), converter=declared_words.as_set, validator=declared_words.optional_names
    )
    takes_copies: bool = attrs.field(default=False, validator=declared_words.flag)
    reads_dead_tokens: bool = attrs.field(default=False, validator=declared_words.flag)
    soft_cap: bool = attrs.field(default=False, validator=declared_words.flag)
    sinks: bool = attrs.field(default=False, validator=declared_words.flag)
    relative_bias: bool = attrs.field(default=False, validator=declared_words.flag)
    head_sizes: frozenset[int] | None = attrs.field(
        default=None, converter=declared_words.as_set, validator=declared_words.optional_sizes
    )
    separate_value_size: bool = attrs.field(default=False, validator=declared_words.flag)
    returns_lse: bool = attrs.field(default=False, validator=declared_words.flag)
    block_size_multiple: int = attrs.field(default=1, validator=declared_words.size)
    spec_sizes: Mapping[str, frozenset[int]] = attrs.field(
        default=MappingProxyType({}),
        converter=declared_words.as_sizes,
        validator=declared_words.sizes_by_field,
        hash=False,
    )
    preference: int = attrs.field(default=0, validator=declared_words.whole_number)

    @property
    def not_causal(self) -> Refusal | None:
        """Why it cannot take a batch that is not causal, which overrides causal masks; None if it can."""
        if self.masks & {"bidirectional", "mask_function", "live_range"}:
            return None
        return Refusal("mask_bidirectional", f"has no mask bidirectional ({', '.join(sorted(self.masks))})")

    def needs_copies(self, layer: LayerSpec) -> bool:
        """Return whether it serves a layer on copies of its pages, because it does not read their format."""
        return layer.spec is not None and layer.spec.kv_format.name not in self.formats

    def refusals(
        self, layer: LayerSpec, device: str, extensions: Collection[str] = (), *, lse: bool = False
    ) -> list[Refusal]:
        """Return every reason why a layer cannot be served; empty if it can.

        Args:
            layer: The layer as its wrapper chain leaves it.
            device: Where it runs (``"cpu"``).
            extensions: The extensions that its chain may add to the batch metadata.
            lse: Whether the log-sum-exp is needed too.
        """
        spec, query = layer.spec, layer.query
        assert spec is not None
        assert query is not None
        found = []

        def refuse(code: str, reason: str) -> None:
            found.append(Refusal(code, reason))

        def listed(names: frozenset[str] | frozenset[int]) -> str:
            return ", ".join(str(name) for name in sorted(names))

        if device not in self.devices:
            refuse("device", f"runs on {listed(self.devices)}, not on {device}")
        if self.needs_copies(layer) and not self.takes_copies:
            refuse(
                "format", f"reads the formats {listed(self.formats)}, not {spec.kv_format.name}, and takes no copies"
            )
        spec = spec.in_format(PLAIN)
        state = spec.state_tensors()
        if set(state) != self.state:
            refuse("state", f"reads the state tensors {listed(self.state)}, not {listed(frozenset(state))}")
        for dtype in sorted({tensor.dtype for tensor in state.values()} - self.dtypes):
            refuse("dtype", f"stores {listed(self.dtypes)}, not {dtype}")
        has_function = spec.mask_function is not None
        if spec.is_sparse:
            if "sparse" not in self.masks:
                refuse("mask_sparse", f"has no mask sparse, and would see every live token ({listed(self.masks)})")
        elif not ("live_range" in self.masks or ("mask_function" in self.masks and has_function)):
            if spec.mask is not None:
                for feature in sorted(spec.mask.features - self.masks):
                    refuse(f"mask_{feature}", f"has no mask {feature} ({listed(self.masks)})")
            elif has_function:
                refuse("mask_function", f"takes no mask function ({listed(self.masks)})")
            else:
                refuse("mask_live_range", f"has no mask live_range ({listed(self.masks)})")
        not_causal = self.not_causal
        if spec.sequence != TOKENS and not_causal is not None and not_causal not in found:
            # Between the positions of two sequences there is no order: such a batch is never causal.
            found.append(not_causal)
        for extension in sorted(set(extensions) - self.extensions):
            refuse(f"extension_{extension}", f"does not honour the extension {extension}")
        if lse and not self.returns_lse:
            refuse("lse", "returns no log-sum-exp, by which parts of the keys are merged")
        if query.soft_cap is not None and not self.soft_cap:
            refuse("soft_cap", "does not cap scores")
        if query.has_sinks and not self.sinks:
            refuse("sinks", "does not add learned sinks")
        if self.reads_dead_tokens and spec.mask is not None and spec.mask.window == 1:
            # Between steps nothing is live, so that the page of the next token may be another one.
            refuse("mask_window", "reads what lies before a window, and before one of a single token nothing is kept")
        if query.relative_bias is not None and not self.relative_bias:
            refuse("relative_bias", "adds no learned bias to the scores")
        if self.head_sizes is not None and query.head_size not in self.head_sizes:
            refuse("head_size", f"takes head sizes {listed(self.head_sizes)}, not {query.head_size}")
        value_sizes = {tensor.shape[-1] for name, tensor in state.items() if name == "v"}
        if not self.separate_value_size and value_sizes - {query.head_size}:
            refuse("value_size", f"takes value vectors as long as key vectors ({query.head_size})")
        if spec.block_size % self.block_size_multiple:
            refuse("block_size", f"takes blocks of a multiple of {self.block_size_multiple}, not {spec.block_size}")
        for name, sizes in sorted(self.spec_sizes.items()):
            # A spec of another kind, without the field, has other state too.
            if getattr(spec, name, None) not in {None, *sizes}:
                refuse(name, f"takes {name} {listed(sizes)}, not {getattr(spec, name)}")
        return found


class AttentionMetadataBuilder(ABC):
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

        None, the default, stands for the layers' spec and query side. If a builder depends on less, it returns that,
        and more layers share its metadata.
        """
        return None

    @abstractmethod
    def build(self, metadata: CommonAttentionMetadata) -> Any:
        """Return the backend's metadata.

        Called by the framework before any of the group's layers runs: once a step for all attention groups with an
        equal ``reuse_key``, the same backend and the same wrapped metadata.

        A builder, and what it returns, keeps no tensor of the host's: neither the fields with the suffix ``_cpu`` nor
        those that ``on_host`` names, unless they are for ``finish`` or go to the device. A host may write the next
        step into the same memory when the metadata is built, so an equal ``id()`` does not mean an equal content.

        Args:
            metadata: The step's metadata after the group's wrapper chain. Never written to.
        """

    @classmethod
    def build_together(cls, builds: Sequence[tuple[Self, CommonAttentionMetadata]]) -> list[Any]:
        """Return what each builder's ``build`` returns for its metadata.

        Called by the framework once a step, for all builders of a class that have to build. The default builds one
        after the other. A builder of many small operations can override it and do them for all groups at once.

        Args:
            builds: Pairs of a builder and the metadata that it builds from, all of one step.
        """
        return [builder.build(metadata) for builder, metadata in builds]

    def finish(self, built: Any) -> Any:
        """Return what the layers read, made from the result of ``build``, whose tensors now lie on the device.

        Called by the framework once a step for each result of ``build``, before any of the group's layers runs: here a
        builder computes on the device from what the step's one copy brought there. The default changes nothing.

        Args:
            built: The result of ``build``. If the builder declares ``table_fields``, the returned value must have these
                fields and must not otherwise depend on them: the framework replaces them for other cache groups.
        """
        return built

    def refreshed_fields(self, built: Any, metadata: CommonAttentionMetadata) -> Mapping[str, Any]:
        """Return the ``table_fields`` of what ``build`` would return for ``metadata``.

        Args:
            built: The result of this builder, or of one with an equal ``reuse_key``, for metadata that differs from
                ``metadata`` only in the block table and the slots.
            metadata: The step's metadata after the group's wrapper chain. Never written to.
        """
        raise NotImplementedError(f"{type(self).__name__} declares table_fields and does not refresh them")


class _PassThroughBuilder(AttentionMetadataBuilder):
    on_host = frozenset()

    def build(self, metadata: CommonAttentionMetadata) -> Any:
        return metadata


class AttentionBackend(ABC):
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
        """Return a kernel that copies pages when requests are swapped; None, the default, for a copy by torch.

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

    def bind(self, layer: LayerSpec, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the learned tensors of one layer's attention.

        Called once for each layer that has any, when the model is attached. The default keeps them in ``parameters``.

        Args:
            layer: The layer, as the group's wrapper chain leaves it.
            parameters: By name, such as ``relative_bias: [num_buckets, num_heads]``, device; not written to.
        """
        self.parameters[layer.name] = parameters

    def make_builder(self) -> AttentionMetadataBuilder:
        """Return the group's metadata builder; the default passes the batch metadata on unchanged."""
        return _PassThroughBuilder()

    def write_kv(self, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache, slots: Slots) -> None:
        """Store new tokens' keys and values. Called before ``forward``, never for a layer that shares a cache.

        The default calls the ``write`` of the layers' format.

        Args:
            key: ``[num_tokens, num_kv_heads, head_size], device``; if the type stores something else, the first part of
                that, as its spec describes.
            value: ``[num_tokens, num_kv_heads, head_size_v], device``; if the type stores something else, the second
                part.
            kv_cache: The layer's state tensors; written to.
            slots: Where each token is stored, ``[num_tokens]``; one with a negative slot is not stored.
        """
        assert self.layers[0].spec is not None
        self.layers[0].spec.kv_format.write(key, value, kv_cache, slots)

    @abstractmethod
    def forward(
        self,
        layer: LayerSpec,
        query: torch.Tensor,
        kv_cache: KVCache,
        metadata: Any,
        sinks: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of the new tokens over the cache, their own keys included (already written).

        Args:
            layer: The layer that runs, as the group's wrapper chain leaves it.
            query: ``[num_tokens, num_heads, head_size], device``.
            kv_cache: The state tensors of the layer, or of the layer whose cache it shares; not written to.
            metadata: What this backend's builder made for the step. If it holds the batch metadata, its tensors on the
                device are read, and not the copies on the host.
            sinks: ``[num_heads], device``: learned sink logits; None unless the layer has them.
            out: Where the host wants the result, of its shape and dtype, contiguous, device; None if it wants a new
                tensor. A backend that can writes there and returns ``out``. If it returns another tensor, the host
                copies that.

        Returns:
            ``[num_tokens, num_heads, head_size_v], device``, in the query's dtype.
        """

    def forward_with_lse(
        self, layer: LayerSpec, query: torch.Tensor, kv_cache: KVCache, metadata: Any, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute what ``forward`` computes, and the log-sum-exp of each query and head.

        Called instead of ``forward`` when the keys of a request are attended to in parts, on one device or on several,
        whose results ``merge_attention`` merges. Only backends that declare ``returns_lse`` are asked.

        The log-sum-exp is the natural logarithm of the softmax's denominator, ``log(sum_t exp(s_t))`` over the tokens
        that the query sees. A score ``s_t`` includes the layer's scale, its soft cap and its bias. A learned sink is
        one more term of the sum. So the caller gives the sinks to one of the parts, and None to the others.

        Args:
            layer: As for ``forward``.
            query: As for ``forward``.
            kv_cache: As for ``forward``.
            metadata: As for ``forward``.
            sinks: ``[num_heads], device``; None also for a layer with sinks, if another part has them.

        Returns:
            The output, as ``forward`` returns it; and the log-sum-exp, ``[num_tokens, num_heads], device``, in float32,
            or in float64 if the query has it. It is ``-inf`` for a query that sees neither a key nor a sink. The rows
            of padded tokens are there, and never used.

        Raises:
            BackendError: The backend does not declare ``returns_lse``; the code is ``lse``.
        """
        raise BackendError(f"{type(self).__name__} returns no log-sum-exp: it does not declare returns_lse", "lse")
