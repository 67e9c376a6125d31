"""Keys and values in 8 and 4 bits for kvframe."""

from kvframe_kv_formats.formats import Fp8Tensor, Fp8TokenHead, Int4TokenHead, Int8TokenHead

__all__ = ["Fp8Tensor", "Fp8TokenHead", "Int4TokenHead", "Int8TokenHead"]
