"""An encoder's input, checked and hashed on the host: token ids, or features."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.contract import ModelInput, RequestError


@attrs.frozen(eq=False)
class EncoderStates:
    """An encoder's output: the data of an input that need not be encoded.

    Attributes:
        states: ``[num_tokens, hidden_size], device``.
    """

    states: torch.Tensor


def ids_input(value: Any, vocab_size: int) -> ModelInput:
    """Return an input of token ids.

    Args:
        value: The ids, as a sequence, a tensor or an array.
        vocab_size: The number of token ids of the encoder.

    Raises:
        RequestError: They are not ids of the encoder, or there are none.
    """
    try:
        # Bytes are text, and sets and mappings have no order.
        is_other = isinstance(value, bytes | bytearray | Set | Mapping)
        token_ids = None if is_other else list(value.tolist() if isinstance(value, torch.Tensor) else value)
    except (TypeError, RuntimeError):  # for example, a tensor without data
        token_ids = None
    if token_ids is None:
        raise RequestError(f"the encoder reads text or token ids, not {type(value).__name__}", code="bad_input")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise RequestError(
                f"the encoder's token ids are whole numbers, not {type(token).__name__}", code="bad_input"
            )
        if not 0 <= token < vocab_size:
            raise RequestError(f"{token} is not a token id of the encoder; it has [0, {vocab_size})", code="bad_input")
    if not token_ids:
        raise RequestError("the encoder's input is empty; give at least one token", code="bad_input")
    data = torch.tensor([int(token) for token in token_ids])
    return ModelInput(num_tokens=len(data), key=_hash("int64", data.shape, array("q", data.tolist())), data=data)


def features_input(value: Any, num_tokens_of: Callable[[torch.Size], int]) -> ModelInput:
    """Return an input of features.

    Args:
        value: Numbers as a tensor or an array, as a feature extractor returns them for one request; a leading batch
            dimension of one is removed.
        num_tokens_of: Returns the number of tokens that the encoder makes of features of a shape; raises ``ValueError``
            or ``RuntimeError`` for a shape that the encoder does not take.

    Raises:
        RequestError: ``value`` is not such an input.
    """
    try:
        features = torch.as_tensor(value).detach()
        if features.is_complex():
            raise TypeError("half of each number would be lost")
        data = features.to("cpu", torch.float32).contiguous()
    except (TypeError, ValueError, RuntimeError) as error:
        raise RequestError(
            f"the encoder takes features, a tensor or an array of real numbers, not {type(value).__name__}",
            code="bad_input",
        ) from error
    if data.dim() > 2 and data.shape[0] == 1:
        data = data[0]
    try:
        num_tokens = num_tokens_of(data.shape)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:  # raised by the model's check or first layer
        why = str(error).partition("\n")[0] or type(error).__name__
        raise RequestError(
            f"the encoder takes no features of shape {list(data.shape)}: {why}", code="bad_input"
        ) from error
    if num_tokens < 1:
        raise RequestError(f"features of shape {list(data.shape)} are too short for a token", code="bad_input")
    if not data.isfinite().all():
        raise RequestError("the features hold numbers that are not finite", code="bad_input")
    return ModelInput(num_tokens=num_tokens, key=_hash("float32", data.shape, data.numpy()), data=data)


def _hash(dtype: str, shape: Sequence[int], content: Any) -> bytes:
    """Return the SHA-256 of a tensor: its dtype and shape, then its bytes."""
    return hashlib.sha256(f"{dtype} {tuple(shape)}\n".encode() + memoryview(content).cast("B")).digest()
