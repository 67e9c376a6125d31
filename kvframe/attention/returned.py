"""Checks what backends and their builders return, and names the backend, the layer and the line if they raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from traceback import walk_tb
from typing import Any, TypeVar

import attrs
import torch

from kvframe.contract.backend import AttentionMetadataBuilder
from kvframe.contract.capture import NotReplayableError
from kvframe.contract.errors import BackendError, KVFrameError, shown
from kvframe.contract.foreign import safe_text
from kvframe.contract.metadata import CommonAttentionMetadata

BuilderT = TypeVar("BuilderT", bound=AttentionMetadataBuilder)


def build_all(
    builder_class: type[BuilderT], builds: Sequence[tuple[BuilderT, CommonAttentionMetadata]]
) -> Sequence[Any]:
    """Return what builders of one class build together, one value for each.

    Raises:
        BackendError: They returned something other than a sequence with one value for each builder.
    """
    results = builder_class.build_together(builds)
    if not isinstance(results, Sequence) or len(results) != len(builds):
        description = f"{len(results)} values" if isinstance(results, Sequence) else f"a {type(results).__name__!r}"
        raise _mistake(
            builder_class, f"build_together returned {description} for {len(builds)} builders, and not one for each"
        )
    return results


def refresh_fields(builder: AttentionMetadataBuilder, result: Any, metadata: CommonAttentionMetadata) -> Any:
    """Return what was built for one cache group as it is for another with equal layers.

    Args:
        builder: Its builder.
        result: What it built, or what a builder with an equal ``reuse_key`` built.
        metadata: The metadata of the other cache group, which differs in the block table and the slots only.

    Raises:
        BackendError: The builder returned other fields than the ``table_fields`` that it declares.
    """
    return replace_fields(builder, result, builder.refreshed_fields(result, metadata))


def replace_fields(builder: AttentionMetadataBuilder, result: Any, fields: Mapping[str, Any]) -> Any:
    """Return what was built with other ``table_fields``.

    Args:
        builder: Its builder.
        result: What was built.
        fields: All of its ``table_fields``.

    Raises:
        BackendError: These are not the ``table_fields``, or what was built does not have them.
    """
    declared = builder.table_fields or frozenset()
    if not isinstance(fields, Mapping) or fields.keys() != declared:
        description = sorted(fields) if isinstance(fields, Mapping) else f"a {type(fields).__name__!r}"
        raise _mistake(
            type(builder),
            f"refreshed_fields returned {description}, and the declared table_fields are {sorted(declared)}",
        )
    try:
        return attrs.evolve(result, **fields)
    except (TypeError, attrs.exceptions.NotAnAttrsClassError) as error:
        raise _mistake(
            type(builder), f"what it built, a {type(result).__name__!r}, has no fields {sorted(fields)} to replace"
        ) from error


def step_failure(backend: str, layers: Sequence[str], method: str, error: BaseException) -> BaseException:
    """Return the error that a backend's method ends a step with.

    Args:
        backend: The backend's registered name.
        layers: The layers that it was called for.
        method: What was called (``"attend"``).
        error: What it raised. Returned as they are: errors of kvframe, those that the capture of a graph handles, and
            ``KeyboardInterrupt``, which comes from the user.
    """
    if isinstance(error, KVFrameError | NotReplayableError | torch.OutOfMemoryError | KeyboardInterrupt):
        return error
    other_layers = f" and {len(layers) - 1} others" if len(layers) > 1 else ""
    *_, (frame, line) = walk_tb(error.__traceback__)
    return BackendError(
        f"backend {backend!r}, of layer {layers[0]!r}{other_layers}: {method}() failed in line {line} of "
        f"{shown(frame.f_globals.get('__name__'))}: {safe_text(error)}",
        code="failed",
    )


def _mistake(builder_class: type[AttentionMetadataBuilder], problem: str) -> BackendError:
    return BackendError(
        f"the metadata builder {builder_class.__module__}:{builder_class.__qualname__} makes a mistake: {problem}",
        code="wrong_metadata",
    )
