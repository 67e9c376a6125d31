"""vLLM's backends, implementations and builder over ``kvframe.HostedLayers``."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import attrs
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, AttentionType

from kvframe import HostedLayers, HostedStep, Registry, Stack
from kvframe.contract import BackendError, CommonAttentionMetadata, KVCache, LayerSpec

LOGGER = logging.getLogger("vllm.kvframe")  # vLLM shows what its own loggers say


class HostedBackend(AttentionBackend):
    """What vLLM sees for layers with keys and values. Which backend of kvframe computes them, the stack decides."""

    forward_includes_kv_cache_update = True
    supported_dtypes = (torch.float32, torch.float16, torch.bfloat16)

    get_name = staticmethod(lambda: "CUSTOM")  # vLLM's enum has this member for backends of others
    get_impl_cls = staticmethod(lambda: HostedImpl)
    get_builder_cls = staticmethod(lambda: HostedBuilder)


class HostedLatentBackend(HostedBackend):
    """What vLLM sees for layers with latents (MLA)."""

    is_mla = classmethod(lambda cls: True)
    get_impl_cls = staticmethod(lambda: HostedLatentImpl)


@attrs.frozen(eq=False)
class HostedMetadata:
    """What a builder gives to its layers in a step.

    Attributes:
        hosted: The layers' backends.
        step: What they read in this step.
        num_actual_tokens: Tokens that the layers compute, without padding.
        logits_indices_padded: For skipped layers, the rows of the batch that vLLM's model computes; None for all.
    """

    hosted: HostedLayers
    step: HostedStep
    num_actual_tokens: int
    logits_indices_padded: torch.Tensor | None
    # By these, vLLM's layers with latents hand all tokens over at once.
    num_prefills: ClassVar[int] = 1
    num_decodes: ClassVar[int] = 0
    num_decode_tokens: ClassVar[int] = 0

    @property
    def num_logits_indices(self) -> int | None:
        """How many rows vLLM's model computes, without padding; None for all."""
        return None if self.logits_indices_padded is None else self.num_actual_tokens


class HostedImpl(AttentionImpl):
    """One layer: it passes vLLM's tensors on, and copies none of them.

    Attributes:
        stored: The state tensors in its pages.
        known: What else it may be made with.
        layer: The layer as the contract sees it; set once the model is loaded.
        is_skipped: Whether vLLM computes only the tokens that generate; set likewise.
        target: The layer whose cache it reads; None for its own.
        refusal: What it was made with that kvframe does not serve; empty for nothing.
    """

    stored: ClassVar[frozenset[str]] = frozenset({"k", "v"})
    known: ClassVar[frozenset[str]] = frozenset()
    layer: LayerSpec
    is_skipped = False

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
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.sliding_window, self.logits_soft_cap, self.sinks = sliding_window, logits_soft_cap or None, sinks
        self.target = kv_sharing_target_layer_name
        found = {
            "ALiBi slopes": alibi_slopes is not None,
            f"attention of the type {attn_type}": attn_type != AttentionType.DECODER,
            f"a cache of {kv_cache_dtype}": kv_cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            "a window over latents": sliding_window is not None and "latent" in self.stored,
            **{name: value is not None for name, value in others.items() if name not in self.known},
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
            output: ``[num_tokens, num_heads, head_size_v], device``; written to, and returned.
            output_scale: None: output is not quantized.
            output_block_scale: None likewise.
        """
        if attn_metadata is None:
            return output.zero_()
        by_token = kv_cache.transpose(1, 2)
        pages = {"k": by_token[..., : self.head_size], "v": by_token[..., self.head_size :]}
        self._compute(query, key, value, pages, attn_metadata, output)
        return output

    def _compute(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        pages: KVCache,
        metadata: HostedMetadata,
        output: torch.Tensor,
    ) -> None:
        name, num, rows = self.layer.name, metadata.num_actual_tokens, metadata.logits_indices_padded
        if rows is not None and len(rows) != len(query):
            raise BackendError(
                f"layer {name!r} was to get the {len(rows)} tokens that generate, and got {len(query)}: its model "
                "skips none; unset kv_sharing_fast_prefill in vLLM, and prefill_skipping in the stack"
            )
        if self.target is None and key is not None and value is not None:
            metadata.hosted.write(metadata.step, name, key[:num], value[:num], pages)
        metadata.hosted.attend(metadata.step, name, query[:num], pages, sinks=self.sinks, out=output[:num])


class HostedLatentImpl(HostedImpl):
    """One layer with latents: it passes these on, and neither vLLM nor this class makes keys and values of them."""

    stored = frozenset({"latent"})
    known = frozenset(
        [
            "q_lora_rank",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "qk_head_dim",
            "v_head_dim",
            "kv_b_proj",
        ]
    )

    def do_kv_cache_update(self, *given: Any) -> None:
        """Store nothing yet: vLLM hands the same latents to ``forward_mha``, with the step."""

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: HostedMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Store a step's latents, and compute its attention.

        Args:
            q: ``[num_tokens, num_heads, head_size], device``, the rotated part last.
            kv_c_normed: ``[num_tokens, latent_size], device``.
            k_pe: ``[num_tokens, 1, rope_size], device``.
            kv_c_and_k_pe_cache: ``[num_blocks, block_size, latent_size + rope_size], device``.
            attn_metadata: The step.
            k_scale: Not used: latents are not quantized.
            output: ``[num_tokens, num_heads * head_size_v], device``; written to.
            output_scale: None: output is not quantized.
        """
        by_head = output.unflatten(-1, (self.num_heads, -1))
        self._compute(q, kv_c_normed.unsqueeze(1), k_pe, {"latent": kv_c_and_k_pe_cache}, attn_metadata, by_head)


class HostedBuilder(AttentionMetadataBuilder):
    """Makes a step's metadata for the layers of one of vLLM's groups, whatever their specs, queries and backends.

    Attributes:
        stack: The rules; set once, before vLLM makes an instance.
        registry: The names that the stack's plugins registered; set likewise.
    """

    stack: ClassVar[Stack]
    registry: ClassVar[Registry]

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the builders that vLLM derives (for chunks, for skipped layers) see the batch as it is.

        Theirs would change it before this one sees it. Here, the wrappers of kvframe do.
        """
        super().__init_subclass__(**options)
        cls.build = HostedBuilder.build  # type: ignore[method-assign]

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
        modules = vllm_config.compilation_config.static_forward_context
        self._block_size = kv_cache_spec.block_size

        def in_blocks(name: str) -> LayerSpec:
            layer: LayerSpec = modules[name].impl.layer
            assert layer.spec is not None  # it was described with one
            return attrs.evolve(layer, spec=attrs.evolve(layer.spec, block_size=self._block_size))

        layers = [in_blocks(name) for name in layer_names]
        elsewhere = {layer.shares_with for layer in layers if layer.shares_with is not None} - {*layer_names}
        skipped = [name for name in layer_names if modules[name].impl.is_skipped]
        owners = [in_blocks(name) for name in sorted(elsewhere)]
        self._hosted = HostedLayers(layers, self.stack, self.registry, device, skipped=skipped, owners=owners)
        self._skips = bool(skipped)
        for name in layer_names:
            if "latent" in modules[name].impl.stored:
                up = torch.cat([modules[name].W_UK_T, modules[name].W_UV.transpose(1, 2)], dim=1)
                self._hosted.bind(name, {"kv_up": up})
        backends = ", ".join(sorted({choice.backend for choice in self._hosted.choices}))
        LOGGER.info("kvframe serves %d layers in blocks of %d tokens by %s", len(layers), self._block_size, backends)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> HostedMetadata:
        """Make a step's metadata of vLLM's batch. The other arguments are not used.

        Raises:
            BackendError: A backend cannot take the step.
        """
        batch = common_attn_metadata
        num_tokens = num_computed = batch.num_actual_tokens
        rows, generating = (batch.logits_indices_padded if self._skips else None), None
        if rows is not None:
            num_computed, generating = batch.num_logits_indices, rows[: batch.num_logits_indices]
        step = self._hosted.begin_step(
            CommonAttentionMetadata(
                query_start_loc=batch.query_start_loc,
                query_start_loc_cpu=batch.query_start_loc_cpu,
                seq_lens=batch.seq_lens,
                seq_lens_cpu=batch.seq_lens_cpu_upper_bound,
                exact_lens=False,
                num_reqs=batch.num_reqs,
                num_actual_tokens=num_tokens,
                max_query_len=batch.max_query_len,
                max_seq_len=batch.max_seq_len,
                block_table=batch.block_table_tensor,
                slot_mapping=batch.slot_mapping[:num_tokens],
                block_size=self._block_size,
                num_generating=num_computed,
                generating_indices=generating,
                generating_indices_cpu=None if generating is None else generating.cpu(),
                causal=batch.causal,
            )
        )
        return HostedMetadata(self._hosted, step, num_computed, rows)
