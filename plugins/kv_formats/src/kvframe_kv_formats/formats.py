"""The formats as values: their names, their options, and the content of their pages.

Planning imports this module, so it imports no torch; ``codes`` has the arithmetic.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from kvframe.contract import KVFormat, SpecError, StateTensor

if TYPE_CHECKING:
    import torch

    from kvframe.contract import Slots

COMPUTED_IN = ("float64", "float32", "float16", "bfloat16")
"""The dtypes of keys and values that the formats store."""

SIDES = ("k", "v")


@attrs.frozen(kw_only=True)
class CodedFormat(KVFormat):
    """Keys and values as codes, stored with the numbers that decode them: the base of this distribution's formats."""

    def state_tensors(
        self, block_size: int, num_kv_heads: int, head_size: int, head_size_v: int, dtype: str
    ) -> Mapping[str, StateTensor]:
        """Return the state tensors: ``k`` and the numbers that decode it, then ``v`` likewise.

        Raises:
            SpecError: Attention does not compute in ``dtype``, or a vector has a length that the format cannot store.
        """
        if dtype not in COMPUTED_IN:
            raise SpecError(f"{self.name} stores keys and values of the dtypes {', '.join(COMPUTED_IN)}, not {dtype}")
        return {
            name: StateTensor((block_size, num_kv_heads, *shape), stored)
            for side, size in zip(SIDES, (head_size, head_size_v), strict=True)
            for name, (shape, stored) in self.parts(side, size).items()
        }

    @abstractmethod
    def parts(self, side: str, size: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return the parts that store one token and head, by name: shape and dtype, the codes first.

        Args:
            side: ``"k"`` or ``"v"``.
            size: Elements of the vector.
        """

    @abstractmethod
    def encode(self, side: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return the parts of vectors.

        Args:
            side: ``"k"`` or ``"v"``.
            values: ``[num_tokens, num_kv_heads, size], float32, device``.
        """

    @abstractmethod
    def decode(self, side: str, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Turn parts back into vectors.

        Args:
            side: ``"k"`` or ``"v"``.
            parts: By name, each with the same leading dimensions.
            out: ``[…, size], float32, device``; written to.
        """

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Mapping[str, torch.Tensor],
        slots: Slots,
    ) -> None:
        """Store tokens, computed in float32."""
        from kvframe_kv_formats.codes import put

        for side, values in zip(SIDES, (key, value), strict=True):
            for name, part in self.encode(side, values.float()).items():
                put(kv_cache[name], slots.indices, part)

    def read(
        self, kv_cache: Mapping[str, torch.Tensor], block_ids: torch.Tensor, out: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy whole pages, computed in float32, then rounded to the dtype of ``out``."""
        from kvframe_kv_formats.codes import read_pages

        for side in SIDES:
            names = self.parts(side, out[side].shape[-1])
            read_pages({name: kv_cache[name] for name in names}, block_ids, out[side], self.decode, side)


MIN_SCALE, MAX_SCALE = 2.0**-126, 2.0**119
"""The smallest normal float32, and the largest power of two whose product with the largest code, 448, is finite."""


def _usable_scale(instance: Any, attribute: attrs.Attribute[float], value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise SpecError(f"{attribute.name} must be a positive number, not {value!r}")
    if not MIN_SCALE <= value <= MAX_SCALE:
        reach = f"from {MIN_SCALE:.3g} to {MAX_SCALE:.3g}"
        raise SpecError(f"{attribute.name} must be {reach}, as float32 computes with it, not {value!r}")


@attrs.frozen(kw_only=True)
class Fp8Tensor(CodedFormat):
    """Eight-bit floats with one scale for all keys of a layer, and one for all values.

    A value is the stored number (``float8_e4m3fn``: 448 at most) times the scale. Larger values saturate, including
    infinities; NaN stays NaN.

    Attributes:
        k_scale: The factor on stored keys.
        v_scale: The factor on stored values.
    """

    name: ClassVar[str] = "fp8_tensor"
    rounding: ClassVar[float] = 0.125

    k_scale: float = attrs.field(default=1.0, validator=_usable_scale)
    v_scale: float = attrs.field(default=1.0, validator=_usable_scale)

    def parts(self, side: str, size: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return the vector in eight-bit floats."""
        return {side: ((size,), "float8_e4m3fn")}

    def encode(self, side: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return ``values / scale``, rounded to the nearest, ties to even."""
        from kvframe_kv_formats.codes import to_fp8

        return {side: to_fp8(values / self._scale(side))}

    def decode(self, side: str, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Write the stored numbers times the scale."""
        from kvframe_kv_formats.codes import widen_fp8

        widen_fp8(parts[side], out)
        if self._scale(side) != 1:
            out.mul_(self._scale(side))

    def _scale(self, side: str) -> float:
        return self.k_scale if side == "k" else self.v_scale


@attrs.frozen(kw_only=True)
class ScaledTokenHead(CodedFormat):
    """One scale per token and head, that of its largest element: the base of the two eight-bit formats of this kind.

    A vector with an element that is not finite reads as NaN.
    """

    dtype: ClassVar[str]
    """The dtype of the codes."""
    largest: ClassVar[float]
    """The largest code."""

    def parts(self, side: str, size: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return the codes and the scale."""
        return {side: ((size,), self.dtype), f"{side}_scale": ((), "float32")}

    def encode(self, side: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return ``values / scale``, rounded to the nearest, ties to even.

        The scale is the largest element's absolute value over the largest code.
        """
        from kvframe_kv_formats.codes import absmax_scale, to_codes

        scale = absmax_scale(values, self.largest)
        return {side: to_codes(values, scale, self.dtype, self.largest), f"{side}_scale": scale}

    def decode(self, side: str, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Write the codes times the scale."""
        from kvframe_kv_formats.codes import widen_fp8

        if parts[side].dtype.is_floating_point:
            widen_fp8(parts[side], out)
        else:
            out.copy_(parts[side])
        out.mul_(parts[f"{side}_scale"].unsqueeze(-1))


@attrs.frozen(kw_only=True)
class Fp8TokenHead(ScaledTokenHead):
    """Eight-bit floats; the largest element of each vector becomes 448."""

    name: ClassVar[str] = "fp8_token_head"
    rounding: ClassVar[float] = 0.125
    dtype: ClassVar[str] = "float8_e4m3fn"
    largest: ClassVar[float] = 448.0


@attrs.frozen(kw_only=True)
class Int8TokenHead(ScaledTokenHead):
    """Eight-bit integers, symmetric; the largest element of each vector becomes 127.

    This is the vector-wise quantisation of LLM.int8 (arXiv 2208.07339), applied to keys and values.
    """

    name: ClassVar[str] = "int8_token_head"
    rounding: ClassVar[float] = 1 / 127
    dtype: ClassVar[str] = "int8"
    largest: ClassVar[float] = 127.0


@attrs.frozen(kw_only=True)
class Int4TokenHead(CodedFormat):
    """Four-bit integers between the smallest and the largest element of each vector.

    This is the per-token scheme of KIVI (arXiv 2402.02750), with one group per head, and for keys too.
    Scale and smallest element are float16: numbers beyond 65504 saturate. A vector with an element that is not finite
    reads as NaN.
    """

    name: ClassVar[str] = "int4_token_head"
    rounding: ClassVar[float] = 1 / 15

    def parts(self, side: str, size: int) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Return the codes, two to a byte, the scale and the smallest element.

        Raises:
            SpecError: ``size`` is odd.
        """
        if size % 2:
            raise SpecError(f"{self.name} stores two elements in a byte, and {side} vectors have {size}, an odd number")
        return {side: ((size // 2,), "uint8"), f"{side}_scale": ((), "float16"), f"{side}_min": ((), "float16")}

    def encode(self, side: str, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Return ``(values - min) / scale``, rounded to the nearest, ties to even, in nibbles.

        The low nibble of byte ``j`` is element ``j``, the high one element ``j + size / 2``. The scale is
        ``(max - min) / 15``, with ``min`` as it is stored.
        """
        from kvframe_kv_formats.codes import range_scale, to_nibbles

        scale, low = range_scale(values)
        return {side: to_nibbles(values, scale, low), f"{side}_scale": scale, f"{side}_min": low}

    def decode(self, side: str, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Write the codes times the scale, plus the smallest element."""
        from kvframe_kv_formats.codes import from_nibbles

        from_nibbles(parts[side], parts[f"{side}_scale"], parts[f"{side}_min"], out)
