"""Another serving engine as the host: the layers of one of its cache groups, on the backends that a stack chooses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import attrs
import torch

from kvframe.attention.build import GroupMetadata, MetadataPlan, PreparedStep
from kvframe.attention.captured import CapturedStep
from kvframe.attention.copies import CopyScratch
from kvframe.attention.group import form_groups
from kvframe.attention.layer import ServedLayer
from kvframe.attention.nested import replace_tensors
from kvframe.attention.staging import HOST, StagedMemory, Staging
from kvframe.config.stack import Stack
from kvframe.contract.backend import KVCache
from kvframe.contract.capture import NotReplayableError
from kvframe.contract.errors import BackendError
from kvframe.contract.metadata import CommonAttentionMetadata
from kvframe.contract.slots import Slots
from kvframe.contract.specs import TOKENS, LayerSpec
from kvframe.loading.registry import Registry
from kvframe.planning.groups import group_layers
from kvframe.selection.choice import Choice
from kvframe.selection.select import select_backends
from kvframe.selection.skipping import Skipping


@attrs.frozen(eq=False)
class HostedStep:
    """A step of ``HostedLayers``.

    Attributes:
        reads: What each attention group reads.
        captured: The memory that they lie in, if the step is for a graph; otherwise None.
    """

    reads: Sequence[GroupMetadata]
    captured: CapturedStep | None = None


class HostedLayers:
    """Attention layers that share one cache group of another host: its pages, its block tables, its scheduler.

    The host calls ``begin_step`` with its batch metadata, and then for each layer ``write`` and ``attend``. The wrapper
    chains, the builders and the backends are those that a stack chooses. Nothing of a step is kept here, so that a
    host may begin several before the first is computed.

    Attributes:
        choices: For each layer, its wrapper chain, the chosen backend, and why the other backends were not chosen.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        stack: Stack,
        registry: Registry,
        device: torch.device,
        *,
        skipped: Collection[str] = (),
        owners: Sequence[LayerSpec] = (),
    ) -> None:
        """Choose wrapper chains and backends, and set the backends up.

        Args:
            layers: The layers, in the order they run, all with pages of the host's group.
            stack: The rules.
            registry: Where backends and wrappers are looked up (``load_plugins(stack.plugins).registry``).
            device: Where the host computes.
            skipped: The layers for which the host computes only the tokens that generate. Their chains begin with the
                wrapper ``prefill_skipping`` of the stack.
            owners: Layers of the host's group whose caches some of ``layers`` read, and which are served elsewhere.

        Raises:
            BackendError: No backend serves a layer, or the named one cannot, or it could not be set up. Or a layer does
                not attend to tokens of its own request, so that a host's batch does not say what it computes.
            WrapperError: A wrapper cannot serve a layer, or is at a wrong place in its chain.
            KVFrameError: What else ``select_backends`` raises.
        """
        for layer in layers:
            if layer.spec is None or layer.query is None or layer.spec.sequence != TOKENS:
                raise BackendError(
                    f"layer {layer.name!r} cannot be hosted: it does not attend to the tokens of its own request; give "
                    "layers with a cache spec over tokens and a query side"
                )
        self._block_sizes = {layer.spec.block_size for layer in layers if layer.spec is not None}
        self.choices: tuple[Choice, ...] = select_backends(
            layers, stack, registry, device.type, Skipping(layers=tuple(skipped))
        )
        grouping = group_layers([*owners, *layers])
        groups = form_groups(layers, self.choices, grouping, device, scratch=CopyScratch(device))
        self._num_cache_groups = len(grouping.groups)
        self._plan = MetadataPlan(groups, self._num_cache_groups)
        self._staging = Staging(device)
        self._needs_exact = any(group.builder.needs_exact_lens for group in groups)
        self._reads_on_host = device.type != HOST.type and any(group.builder.on_host for group in groups)
        self._written = sorted({group.cache_group for group in groups if group.writes})
        self._layers: dict[str, tuple[int, ServedLayer]] = {
            layer.name: (index, ServedLayer(layer, group))
            for index, group in enumerate(groups)
            for layer in group.layers
        }

    def bind(self, layer: str, parameters: Mapping[str, torch.Tensor]) -> None:
        """Give a layer's learned tensors to its backend, once, before the first step.

        Args:
            layer: Its name.
            parameters: By name, such as ``relative_bias: [num_buckets, num_heads]``, device.

        Raises:
            BackendError: There is no such layer; the bias that it declares is not among them, or has another shape; or
                the backend fails.
        """
        self._named(layer)[1].bind(parameters)

    # --- a step -------------------------------------------------------------------------------------------------------

    def begin_step(self, metadata: CommonAttentionMetadata) -> HostedStep:
        """Apply the wrapper chains and run the builders.

        Args:
            metadata: The host's batch. It is not written to. Its fields with the suffix ``_cpu`` are not read after
                this returns; those on the device are, until the layers have run.

        Raises:
            BackendError: The batch has blocks of another size than the layers' specs. Or a backend or its builder
                cannot take the step: it is not causal (``mask_bidirectional``), has only upper bounds of lengths
                (``inexact_lens``), or says for each request whether it is causal (``causal_per_request``). Or a builder
                raised something (``failed``).
            WrapperError: A wrapper cannot take the step.
        """
        return HostedStep(self._plan.build(self._staging.to_device(self._prepare(metadata))))

    def capture_step(self, metadata: CommonAttentionMetadata) -> HostedStep:
        """Begin a step whose tensors stay where they are, for a graph that is captured of it.

        Args:
            metadata: The batch at the graph's sizes, with ``static_shapes``.

        Raises:
            BackendError: As for ``begin_step``.
            WrapperError: As for ``begin_step``.
        """
        prepared = self._prepare(metadata)
        memory = StagedMemory.of(prepared, self._staging.device)
        groups = self._plan.build(self._staging.to_device(prepared, memory))
        captured = CapturedStep.of(memory, groups, None, ())
        return HostedStep(captured.groups, captured)

    def replay_step(self, step: HostedStep, metadata: CommonAttentionMetadata) -> None:
        """Write a batch into the tensors of a step that was captured.

        Args:
            step: What ``capture_step`` returned.
            metadata: A batch of the same sizes.

        Raises:
            NotReplayableError: The step was not captured, or something other than the values of tensors differs.
            BackendError: As for ``begin_step``.
            WrapperError: As for ``begin_step``.
        """
        if step.captured is None:
            raise NotReplayableError("the step was not captured: begin it by capture_step")
        prepared = self._staging.to_device(self._prepare(metadata), step.captured.memory)
        step.captured.refresh(self._plan.build(prepared), None)

    def _prepare(self, metadata: CommonAttentionMetadata) -> PreparedStep:
        if self._block_sizes - {metadata.block_size}:
            raise BackendError(
                f"the batch has blocks of {metadata.block_size} tokens, and the layers' specs have "
                f"{', '.join(map(str, sorted(self._block_sizes)))}; give both the host's block size"
            )
        if self._needs_exact and not metadata.exact_lens and metadata.seq_lens.is_cpu:
            exact = metadata.seq_lens.clone()
            metadata = attrs.evolve(metadata, seq_lens_cpu=exact, max_seq_len=int(exact.max()), exact_lens=True)
        if self._reads_on_host:
            metadata = replace_tensors(metadata, lambda tensor: tensor.to(HOST))
        prepared = self._plan.prepare([metadata] * self._num_cache_groups)
        if self._written:
            # The host pads with negative slots. All groups store the same tokens in the same slots.
            slots = Slots(metadata.slot_mapping, metadata.block_size)
            prepared.slots = dict.fromkeys(self._written, slots)
        return prepared

    # --- a layer ------------------------------------------------------------------------------------------------------

    def write(self, step: HostedStep, layer: str, key: torch.Tensor, value: torch.Tensor, kv_cache: KVCache) -> None:
        """Store a step's keys and values, unless the layer shares another's cache.

        Args:
            step: The step.
            layer: The layer's name.
            key: ``[num_tokens, num_kv_heads, head_size], device``.
            value: ``[num_tokens, num_kv_heads, head_size_v], device``.
            kv_cache: Its state tensors, each ``[num_blocks, *StateTensor.shape], device``, of any strides; written to.

        Raises:
            BackendError: The backend raised something (``failed``).
        """
        index, served = self._of(layer)
        served.write(key, value, kv_cache, step.reads[index])

    def attend(
        self,
        step: HostedStep,
        layer: str,
        query: torch.Tensor,
        kv_cache: KVCache,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a layer's attention in a step.

        Args:
            step: The step.
            layer: The layer's name.
            query: ``[num_tokens, num_heads, head_size], device``; of a skipped layer, the tokens that generate.
            kv_cache: The state tensors of the layer, or of the layer whose cache it shares; not written to.
            sinks: ``[num_heads], device``: learned sink logits; None unless the layer has them.
            out: Where the result has to be, contiguous, in the query's dtype; None for a new tensor.

        Returns:
            The attention of ``query``, ``[num_tokens, num_heads, head_size_v], device``: ``out`` if it is given.

        Raises:
            BackendError: The backend raised something (``failed``), or returned something else than was agreed
                (``wrong_output``); or the query has another number of rows than the wrapper chain leaves.
        """
        index, served = self._of(layer)
        return served.attend(query, kv_cache, step.reads[index], sinks, out)

    def _named(self, layer: str) -> tuple[int, ServedLayer]:
        found = self._layers.get(layer)
        if found is None:
            raise BackendError(f"there is no layer {layer!r} here; there are {', '.join(map(repr, self._layers))}")
        return found

    def _of(self, layer: str) -> tuple[int, ServedLayer]:
        index, served = self._named(layer)
        if served.lacks_parameters:
            raise BackendError(f"layer {layer!r} needs learned tensors, and none were bound; call bind() of it first")
        return index, served
