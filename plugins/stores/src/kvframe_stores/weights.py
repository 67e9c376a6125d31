"""Digests of weights: they tell whether pages of one model are valid for another."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

_PART_WORDS = 1 << 21
# The constants of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
_STEP, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def digest_weights(weights: Mapping[str, torch.Tensor]) -> str:
    """Return a hexadecimal digest of a model's weights, computed on their devices.

    Digests of weights that differ by accident are different, however small the difference. They give no protection
    against an attacker who makes weights for a given digest.
    """
    digest = hashlib.blake2b(digest_size=32)
    sums = {name: torch.stack(_sums(tensor)) for name, tensor in sorted(weights.items())}
    for name, values in sums.items():
        tensor = weights[name]
        what = f"{tensor.dtype} {tuple(tensor.shape)}"
        for part in (name.encode(), what.encode(), values.cpu().numpy().tobytes()):
            digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return one number per part of a tensor, which depends on all bits of the part; computed on its device."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64) if data.storage_offset() % 8 == 0 else data[:whole].clone().view(torch.int64)
    parts = list(words.split(_PART_WORDS))
    rest = torch.zeros(8, dtype=torch.uint8, device=data.device)
    rest[: data.numel() - whole] = data[whole:]
    return [_sum(part) for part in (*parts, rest.view(torch.int64))]


def _sum(words: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2 ** 64, of SplitMix64 of each word and its index."""
    mixed = torch.arange(len(words), device=words.device).mul_(_signed(_STEP)).add_(words)
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        mixed.bitwise_xor_(mixed >> shift).mul_(_signed(factor))
    return mixed.bitwise_xor_(mixed >> 31).sum()


def _signed(value: int) -> int:
    return value - (1 << 64)
