"""FlashInfer (arXiv 2501.01005): https://github.com/flashinfer-ai/flashinfer, package ``flashinfer-python``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from flashinfer.jit import env
from flashinfer.jit.cpp_ext import get_cuda_path

from kvframe.contract import RANGE_ENDS, AttentionBackend, Capabilities, KVCache, LayerSpec
from kvframe_flashinfer.builder import FlashInferMetadata, FlashInferMetadataBuilder, Problem

KERNELS = ("auto", "fa2", "fa3")


@attrs.frozen(kw_only=True)
class FlashInferOptions:
    """Options of the backend.

    Attributes:
        kernels: The FlashInfer kernels for prompts: ``"fa2"``, ``"fa3"`` on Hopper GPUs, or ``"auto"`` for FlashInfer's
            own choice on the device.
    """

    kernels: str = attrs.field(default="auto", validator=attrs.validators.in_(KERNELS))


class FlashInferBackend(AttentionBackend):
    """Serves causal, bidirectional and windowed attention, ranges, soft caps, learned sinks; pages of any size."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        dtypes=frozenset({"float16", "bfloat16"}),
        masks=frozenset({"causal", "bidirectional", "window", "ranges"}),
        extensions=frozenset({RANGE_ENDS}),
        soft_cap=True,
        sinks=True,
        head_sizes=frozenset({64, 128, 256}),
        formats=frozenset({"plain", "fp8_tensor"}),
        takes_copies=True,
        reads_dead_tokens=True,
        returns_lse=True,
        preference=15,
    )
    options_class = FlashInferOptions

    @classmethod
    def unusable_reason(cls) -> str | None:
        """Return why the device cannot be used, or why there are no kernels for it; None if it can be used."""
        if not torch.cuda.is_available():
            return "needs a CUDA device; torch sees none"
        found = torch.cuda.get_device_capability()
        if found < (8, 0):
            return f"needs compute capability 8.0 or more, and the device has {found[0]}.{found[1]}"
        if not env.FLASHINFER_AOT_DIR.exists() and not _has_compiler():
            return "has no compiled kernels (flashinfer-jit-cache), and finds no nvcc to compile them"
        return None

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device, options: FlashInferOptions) -> None:
        """Keep the group's layers, and let FlashInfer load their kernels, or compile them once, which takes minutes."""
        super().__init__(layers, device, options)
        self._problem = Problem.of(layers[0])
        self._builder = FlashInferMetadataBuilder(self._problem, device, options.kernels)
        self._builder.load_kernels()

    def make_builder(self) -> FlashInferMetadataBuilder:
        """Return the step's builder, which plans."""
        return self._builder

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
        **_: Any,
    ) -> torch.Tensor:
        """Compute attention by the step's plans."""
        assert isinstance(metadata, FlashInferMetadata)
        pages = kv_cache["k"], kv_cache["v"]
        scales = {"k_scale": self._problem.key_scale, "v_scale": self._problem.value_scale}
        rows = query.to(self._problem.query_dtype)
        output = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
        if lse is not None:
            lse.fill_(-math.inf)
        for part in metadata.parts:
            wanted = output[part.rows]
            # The library writes in the dtype that it computes in.
            given = wanted if wanted.dtype == rows.dtype else None
            if lse is None and sinks is None:
                result = part.wrapper.run(rows[part.rows], pages, out=given, **scales)
            else:
                result, normaliser = part.wrapper.run(rows[part.rows], pages, out=given, return_lse=True, **scales)
                # The logarithms have base 2.
                normaliser = normaliser * math.log(2)
                if lse is not None:
                    lse[part.rows] = normaliser
                if sinks is not None:
                    # One more logit in the denominator scales every weight by the softmax's share against it.
                    share = torch.sigmoid(normaliser - sinks.float())[..., None]
                    result = torch.mul(result, share, out=wanted)
            if result is not wanted or isinstance(part.rows, torch.Tensor):
                output[part.rows] = result
        # Padding after the requests.
        output[metadata.num_tokens :].zero_()
        if lse is not None and metadata.keyless_rows is not None:
            # FlashInfer's stand-in for minus infinity is a finite number.
            lse.index_fill_(0, metadata.keyless_rows, -math.inf)
        if lse is not None and sinks is not None:
            torch.logaddexp(lse, sinks.float(), out=lse)
        return output


def _has_compiler() -> bool:
    try:
        return (Path(get_cuda_path()) / "bin" / "nvcc").exists()
    except RuntimeError:  # FlashInfer raises it if there is no CUDA at all
        return False
