"""vLLM's backend, implementation and builder over ``kvframe.HostedLayers``."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import attrs
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType

from kvframe import HostedLayers, HostedStep
from kvframe.contract import CommonAttentionMetadata, LayerSpec
from kvframe_vllm.attach import Choices

LOGGER = logging.getLogger("vllm.kvframe")  # vLLM shows what its own loggers say


class HostedBackend(AttentionBackend):
    """The one backend that vLLM sees. Which of kvframe's computes a layer, the stack decides."""

    forward_includes_kv_cache_update = True
    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)

    @staticmethod
    def get_name() -> str:
        """Return the name of vLLM's enum member for backends of others."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[HostedImpl]:
        """Return the class of which each layer has an instance."""
        return HostedImpl

    @staticmethod
    def get_builder_cls() -> type[HostedBuilder]:
        """Return the class of which each group of layers has an instance."""
        return HostedBuilder


@attrs.frozen(eq=False)
class HostedMetadata:
    """What a builder gives to its layers in a step.

    Attributes:
        hosted: The layers' backends.
        step: What they read in this step.
        num_tokens: Tokens of the step, without padding.
    """

    hosted: HostedLayers
    step: HostedStep
    num_tokens: int


class HostedImpl(AttentionImpl):
    """One layer: it passes vLLM's tensors on, and copies none of them.

    Attributes:
        layer: The layer as the contract sees it; set once the model is loaded.
        refusal: What it was made with that kvframe does not serve; empty for nothing.
    """

    layer: LayerSpec

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **others: Any,
    ) -> None:
        """Keep what vLLM's layer says; it is judged when its name is known."""
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None
        self.writes = kv_sharing_target_layer_name is None
        self.sinks = sinks
        found = {
            "ALiBi slopes": alibi_slopes is not None,
            f"attention of the type {attn_type}": attn_type != AttentionType.DECODER,
            f"a cache of {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            **{name: value is not None for name, value in others.items()},
        }
        self.refusal = ", ".join(name for name, is_there in found.items() if is_there)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: HostedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store a step's keys and values, and compute its attention.

        Args:
            layer: vLLM's layer.
            query: ``[num_tokens, num_heads, head_size], device``, with padding.
            key: ``[num_tokens, num_kv_heads, head_size], device``; None for a layer that has none of its own.
            value: ``[num_tokens, num_kv_heads, head_size_v], device``; None likewise.
            kv_cache: ``[num_blocks, num_kv_heads, block_size, head_size + head_size_v], device``, of any strides.
            attn_metadata: The step; None while vLLM measures memory.
            output: ``[num_tokens, num_heads, head_size_v], device``; written to.
            output_scale: None: output is not quantized.
            output_block_scale: None likewise.

        Returns:
            ``output``.
        """
        if attn_metadata is None:
            return output.zero_()
        hosted, step, num = attn_metadata.hosted, attn_metadata.step, attn_metadata.num_tokens
        name, by_token = self.layer.name, kv_cache.transpose(1, 2)
        pages = {"k": by_token[..., : self.head_size], "v": by_token[..., self.head_size :]}
        if self.writes and key is not None and value is not None:
            hosted.write(step, name, key[:num], value[:num], pages)
        hosted.attend(step, name, query[:num], pages, sinks=self.sinks, out=output[:num])
        return output


class HostedBuilder(AttentionMetadataBuilder):
    """Makes a step's metadata for the layers of one of vLLM's groups, whatever their specs, queries and backends.

    Attributes:
        choices: The stack, and the names that its plugins registered; set once, before vLLM makes an instance.
    """

    choices: ClassVar[Choices]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Choose the layers' wrappers and backends.

        Args:
            kv_cache_spec: The group's, with the size of the blocks that its tables name.
            layer_names: The layers.
            vllm_config: vLLM's configuration, with the layers in it.
            device: Where they are computed.

        Raises:
            BackendError: No backend serves a layer.
            WrapperError: A wrapper cannot serve a layer.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        context = vllm_config.compilation_config.static_forward_context
        self._block_size = kv_cache_spec.block_size
        layers = [_in_blocks(context[name].impl.layer, self._block_size, layer_names) for name in layer_names]
        self._hosted = HostedLayers(layers, self.choices.stack, self.choices.registry, device)
        backends = ", ".join(sorted({choice.backend for choice in self._hosted.choices}))
        LOGGER.info("kvframe serves %d layers in blocks of %d tokens by %s", len(layers), self._block_size, backends)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> HostedMetadata:
        """Make a step's metadata.

        Args:
            common_prefix_len: 0.
            common_attn_metadata: vLLM's batch.
            fast_build: Not used.

        Raises:
            BackendError: A backend cannot take the step.
        """
        batch = common_attn_metadata
        step = self._hosted.begin_step(
            CommonAttentionMetadata(
                query_start_loc=batch.query_start_loc,
                query_start_loc_cpu=batch.query_start_loc_cpu,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=batch.seq_lens_cpu_upper_bound,
                exact_lens=False,
                num_reqs=batch.num_reqs,
                num_actual_tokens=batch.num_actual_tokens,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
                block_table=batch.block_table_tensor,
                slot_mapping=batch.slot_mapping[: batch.num_actual_tokens],
                block_size=self._block_size,
                num_generating=batch.num_actual_tokens,
                causal=batch.causal,
            )
        )
        return HostedMetadata(self._hosted, step, batch.num_actual_tokens)


def _in_blocks(layer: LayerSpec, block_size: int, names: list[str]) -> LayerSpec:
    """Return a layer in blocks of another size, which reads no cache of a layer that is not among ``names``."""
    assert layer.spec is not None  # it was described with one
    shares_with = layer.shares_with if layer.shares_with in names else None
    return attrs.evolve(layer, spec=attrs.evolve(layer.spec, block_size=block_size), shares_with=shares_with)
