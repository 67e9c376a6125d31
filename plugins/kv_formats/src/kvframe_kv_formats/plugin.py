"""The manifest: what this distribution adds to kvframe, by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_formats(register: Register) -> None:
    """Register the formats."""
    register("fp8_tensor", "kvframe_kv_formats.formats:Fp8Tensor")
    register("fp8_token_head", "kvframe_kv_formats.formats:Fp8TokenHead")
    register("int8_token_head", "kvframe_kv_formats.formats:Int8TokenHead")
    register("int4_token_head", "kvframe_kv_formats.formats:Int4TokenHead")
