"""Implement vLLM's interfaces of a backend, of one layer's attention and of a builder by ``kvframe.Layers``."""

from __future__ import annotations

import logging
from inspect import signature
from typing import Any, ClassVar

import attrs
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MLAAttentionImpl

from kvframe import HostedModel, Layers, Step
from kvframe.contract import BackendError, CommonAttentionMetadata, KVCache
from kvframe_vllm.adapter.batch_check import NUM_CHECKED, check_batch
from kvframe_vllm.names import is_untested

LOGGER = logging.getLogger("vllm.kvframe")  # vLLM shows the messages of its own loggers only
PARAMETERS = tuple(signature(AttentionImpl.__init__).parameters)[4:]
"""The arguments with which vLLM makes an implementation, after the sizes and the scale."""
LENGTHS = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "max_query_len", "max_seq_len")
SAME = (*LENGTHS, "num_reqs", "num_actual_tokens", "causal")
"""The fields that have the same name in vLLM's batch and in the contract."""


class HostedBackend(AttentionBackend):
    """The backend that vLLM selects for layers with keys and values. It runs the backend that the stack chooses."""

    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)
    supports_sink = supports_sliding_window = classmethod(lambda cls: True)

    get_name = staticmethod(lambda: "CUSTOM")  # the member of vLLM's enum for foreign backends
    get_impl_cls = staticmethod(lambda: HostedImpl)
    get_builder_cls = staticmethod(lambda: HostedBuilder)


class HostedLatentBackend(HostedBackend):
    """The backend that vLLM selects for layers with latents (MLA)."""

    is_mla = classmethod(lambda cls: True)
    get_impl_cls = staticmethod(lambda: HostedLatentImpl)


@attrs.frozen(eq=False)
class HostedMetadata:
    """A step's metadata that a builder gives to its layers.

    Attributes:
        hosted: The layers' backends.
        step: The metadata of these backends.
        num_actual_tokens: The number of tokens that the layers compute, without padding.
        logits_indices_padded: For skipped layers, the rows of the batch that vLLM's model computes; None for all rows.
        num_logits_indices: The number of these rows without padding; None for all rows.
    """

    hosted: Layers
    step: Step
    num_actual_tokens: int
    logits_indices_padded: torch.Tensor | None
    num_logits_indices: int | None
    # With these values, vLLM's layers with latents pass all tokens in one call.
    num_prefills, num_decodes, num_decode_tokens = 1, 0, 0


class HostedImpl(AttentionImpl):
    """One layer. It passes vLLM's tensors on without a copy.

    In a step, it gets ``query: [num_tokens, num_heads, head_size]``, ``key: [num_tokens, num_kv_heads, head_size]``,
    ``value: [num_tokens, num_kv_heads, head_size_v]`` and ``output: [num_tokens, num_heads, head_size_v]``, device, all
    with padding. A layer that reads another's cache gets None for both, or keys that are not used (before vLLM 0.31).
    The metadata is None while vLLM measures memory.

    Attributes:
        stored: The names of the state tensors in the layer's pages.
        known: The arguments that kvframe reads from the layer itself; all others are ``unknown`` and not served.
        name: The layer's name; set when the model is loaded.
        model: The model's layers as the contract describes them; set when the model is loaded.
    """

    stored: ClassVar[frozenset[str]] = frozenset({"k", "v"})
    known: ClassVar[frozenset[str]] = frozenset(PARAMETERS)
    name: str
    model: HostedModel

    def __init__(self, num_heads: int, head_size: int, scale: float, *given: Any, **named: Any) -> None:
        """Keep the arguments that the layer itself does not have. vLLM passes them by position or by name."""
        made = {**dict(zip(PARAMETERS, given, strict=False)), **named}
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.logits_soft_cap, self.sinks = made.pop("logits_soft_cap", None) or None, made.pop("sinks", None)
        slopes = made.get("alibi_slopes")
        self.alibi_slopes = None if slopes is None else tuple(map(float, slopes))
        self.unknown = sorted(name for name in made if name not in self.known and made[name] is not None)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: Any,
        value: Any,
        kv_cache: torch.Tensor,
        attn_metadata: HostedMetadata | None,
        output: torch.Tensor,
        **scales: None,
    ) -> torch.Tensor:
        """Store a step's keys and values, and write its attention to ``output``, which is not quantized."""
        if attn_metadata is None:
            return output.zero_()
        hosted, step, num = attn_metadata.hosted, attn_metadata.step, attn_metadata.num_actual_tokens
        rows = attn_metadata.logits_indices_padded
        if rows is not None and len(rows) != len(query):
            raise BackendError(
                f"layer {self.name!r} needs the {len(rows)} generating tokens only, but its model passes {len(query)} "
                "tokens and skips none; unset kv_sharing_fast_prefill in vLLM, and prefill_skipping in the stack"
            )
        pages = self.pages(kv_cache)
        if key is not None:
            hosted.write(step, self.name, key[:num], value[:num], pages)
        hosted.attend(step, self.name, query[:num], pages, sinks=self.sinks, out=output[:num])
        return output

    def pages(self, kv_cache: torch.Tensor) -> KVCache:
        """Return the layer's state tensors in ``[num_blocks, num_kv_heads, block_size, head_size + head_size_v]``."""
        by_token = kv_cache.transpose(1, 2)
        return {"k": by_token[..., : self.head_size], "v": by_token[..., self.head_size :]}


class HostedLatentImpl(HostedImpl):
    """One layer with latents. It passes them on; neither vLLM nor this class expands them to keys and values.

    In a step, it gets ``q: [num_tokens, num_heads, head_size]``, the rotated part last, ``kv_c_normed: [num_tokens,
    latent_size]``, ``k_pe: [num_tokens, 1, rope_size]`` and ``output: [num_tokens, num_heads * head_size_v]``, device.
    """

    stored = frozenset({"latent"})
    known = frozenset(signature(MLAAttentionImpl.__init__).parameters) - {"alibi_slopes", "sliding_window", "indexer"}

    def do_kv_cache_update(self, *given: Any) -> None:
        """Do nothing: vLLM passes the same latents to ``forward_mha``, which stores them."""

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: HostedMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        **scales: None,
    ) -> None:
        """Store a step's latents, and write its attention to ``output``. Nothing is quantized, so no scale is used."""
        by_head = output.unflatten(-1, (self.num_heads, -1))
        self.forward(None, q, kv_c_normed.unsqueeze(1), k_pe, kv_cache, attn_metadata, by_head)

    def pages(self, kv_cache: torch.Tensor) -> KVCache:
        """Return the layer's state tensor, ``[num_blocks, block_size, latent_size + rope_size]``."""
        return {"latent": kv_cache}


class HostedBuilder(AttentionMetadataBuilder):
    """Makes a step's metadata for the layers of a group of vLLM, which may differ in specs, queries and backends."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Give this ``build`` to the builders that vLLM derives for chunks and skipped layers."""
        super().__init_subclass__(**options)
        cls.build = HostedBuilder.build  # type: ignore[method-assign]

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        """Choose the layers' wrappers and backends.

        Raises:
            BackendError: No backend serves a layer.
            WrapperError: A wrapper cannot serve a layer.
        """
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        modules = vllm_config.compilation_config.static_forward_context
        model: HostedModel = modules[layer_names[0]].impl.model
        self._block_size, self._skips = kv_cache_spec.block_size, not model.skipped.isdisjoint(layer_names)
        self._hosted = model.serve(layer_names, self._block_size, device)
        self._num_to_check = NUM_CHECKED if is_untested() else 0
        for name in layer_names:
            if "latent" in modules[name].impl.stored:
                up = torch.cat([modules[name].W_UK_T, modules[name].W_UV.transpose(1, 2)], dim=1)
                self._hosted[name].bind({"kv_up": up})
        backends = ", ".join(sorted({choice.backend for choice in self._hosted.choices}))
        served = len(layer_names), self._block_size, backends
        LOGGER.info("kvframe serves %d layers in blocks of %d tokens by %s", *served)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> HostedMetadata:
        """Make a step's metadata from vLLM's batch. The other arguments are not used.

        Raises:
            BackendError: A backend cannot take the step, or this vLLM is untested and its batch is not as expected.
        """
        batch = common_attn_metadata
        if self._num_to_check:
            check_batch(batch, self._block_size)
            self._num_to_check -= 1
        rows, num_rows = (batch.logits_indices_padded, batch.num_logits_indices) if self._skips else (None, None)
        generating = None if rows is None else rows[:num_rows]
        num_computed = batch.num_actual_tokens if num_rows is None else num_rows
        common = CommonAttentionMetadata(
            **{name: getattr(batch, name) for name in SAME},
            seq_lens_cpu=batch.seq_lens_cpu_upper_bound,
            exact_lens=False,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping[: batch.num_actual_tokens],
            block_size=self._block_size,
            num_generating=num_computed,
            generating_indices=generating,
            generating_indices_cpu=None if generating is None else generating.cpu(),
        )
        step = self._hosted.begin_step([common])
        return HostedMetadata(self._hosted, step, num_computed, rows, num_rows)
