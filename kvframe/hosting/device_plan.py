"""What a device's memory holds of a model: weights, a reserve, and the cache of what is left; and what to change."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import attrs

from kvframe.config.options import Use
from kvframe.contract.description import ModelShare
from kvframe.contract.errors import KVFrameError, ModelError, shown
from kvframe.hosting.setup import Setup
from kvframe.planning.layer_file import LayerFiles
from kvframe.planning.plan import KVCachePlan, TooLittleMemoryError
from kvframe.planning.recognise import FoundAdapter, find_reader, with_dtype

_RESERVED_PART, _LEAST_RESERVED_BYTES = 10, 1 << 30
_TRIED_RANKS = (2, 4, 8, 16, 32, 64)
_WEIGHT_BITS = (8, 4)


def setup_of_share(setup: Setup, share: ModelShare, memory_bytes: int | None = None) -> Setup:
    """Return the set-up of a rank's share. Equal ranks have equal plans.

    Args:
        setup: The set-up of the whole model.
        share: What the rank holds.
        memory_bytes: The memory of the rank's cache; the stack's unless given.
    """
    stack = setup.stack
    if memory_bytes is not None:
        stack = attrs.evolve(stack, cache=attrs.evolve(stack.cache, memory=memory_bytes))
    return Setup.of(attrs.evolve(setup.description, layers=share.layers), stack, setup.registry)


def default_reserve(memory_bytes: int) -> int:
    """Return the bytes that are left for activations and the runtime: a tenth of the memory, at least 1 GiB."""
    return max(memory_bytes // _RESERVED_PART, _LEAST_RESERVED_BYTES)


@attrs.frozen(kw_only=True, eq=False, slots=False)
class DevicePlan:
    """What the memory of a device holds of a model, or of each device if equal ranks share the model.

    Attributes:
        path: Where the model is.
        reader: What reads it.
        whole: The set-up of the whole model.
        num_ranks: How many ranks share the model.
        memory_bytes: The memory of a rank's device.
        reserved_bytes: What is left of it for activations and the runtime.
    """

    path: Path
    reader: FoundAdapter | LayerFiles
    whole: Setup
    num_ranks: int
    memory_bytes: int
    reserved_bytes: int

    @cached_property
    def share(self) -> ModelShare:
        """What a rank holds of the model; raises ``ModelError`` if the ranks do not divide it."""
        description, dtype = self.whole.description, self.whole.stack.model.dtype
        return self.reader.share_of_rank(self.path, description, dtype=dtype, num_ranks=self.num_ranks)

    @cached_property
    def weight_bytes(self) -> int:
        """The weights of a rank, and those of a draft model; raises ``ModelError`` if their bytes are not known."""
        num_bytes = [self.share.weight_bytes]
        stack, registry = self.whole.stack, self.whole.registry
        draft = self.whole.drafts.path
        if draft is not None:  # rank 0 has all of it
            reader = find_reader(draft, registry)
            dtype = with_dtype(stack, draft, reader, runs_here=False).model.dtype
            num_bytes.append(reader.share_of_rank(draft, reader.describe(draft), dtype=dtype, num_ranks=1).weight_bytes)
        known_bytes = [each for each in num_bytes if each is not None]
        if len(known_bytes) < len(num_bytes):
            raise ModelError(
                f"{self.path} does not say how many bytes its weights take, so it is not known what a device has left "
                "for the cache; give the memory of the cache by --cache-memory, or weights in the layer file, such as "
                'weights = "15GiB"'
            )
        return sum(known_bytes)

    @property
    def cache_bytes(self) -> int:
        """The memory that is left for the cache; 0 or less if the weights and the reserve take all of it."""
        return self.memory_bytes - self.weight_bytes - self.reserved_bytes

    @cached_property
    def setup(self) -> Setup:
        """The set-up of what a rank holds, with the memory that is left for its cache."""
        return setup_of_share(self.whole, self.share, max(1, self.cache_bytes))

    @cached_property
    def plan(self) -> KVCachePlan | None:
        """The plan of a rank's cache; None if the device has too little memory for it."""
        try:
            return self.setup.plan if self.cache_bytes > 0 else None
        except TooLittleMemoryError:
            return None

    @cached_property
    def longest_request(self) -> int:
        """The most tokens of a request; 0 if the model does not start."""
        if self.plan is None:
            return 0
        return self.plan.longest_request if self.plan.groups else self.plan.max_model_len

    @cached_property
    def changes(self) -> tuple[str, ...]:
        """What would let the model start or, if it does, take requests of the greatest length; each is tried alone."""
        if self.longest_request == self.setup.max_model_len:
            return ()
        changes = []
        if self.longest_request:
            changes.append(f"fewer tokens: --max-model-len {self.longest_request}")
        names = self.whole.registry.formats.names() if self.cache_bytes > 0 else []
        formats = [name for name in names if self._is_enough(format=name)]
        if formats:
            changes.append(f"another format of the cache: [cache] format = {' or '.join(map(shown, formats))}")
        for num_ranks in (number for number in _TRIED_RANKS if number > self.num_ranks):
            share = self._is_enough(num_ranks=num_ranks)
            if share is not None and share.refusal is None:
                changes.append(f"more ranks: --tensor-parallel {num_ranks}")
                break
            if share is not None and not any("another engine" in change for change in changes):
                changes.append(f"more ranks of another engine: --tensor-parallel {num_ranks}")
        return (*changes, *self._smaller_weights())

    def _is_enough(self, *, format: str | None = None, num_ranks: int | None = None) -> ModelShare | None:
        """Return a rank's share if another format or number of ranks is enough for what is missing; otherwise None."""
        whole, registry = self.whole, self.whole.registry
        try:
            if format is not None:
                cache = attrs.evolve(whole.stack.cache, format=Use(format))
                whole = Setup.of(whole.description, attrs.evolve(whole.stack, cache=cache), registry)
            other = attrs.evolve(self, whole=whole, num_ranks=num_ranks or self.num_ranks)
            least = self.setup.max_model_len if self.longest_request else 1
            return other.share if other.longest_request >= least else None
        except KVFrameError:  # the format does not fit the layers, or so many ranks do not divide them
            return None

    def _smaller_weights(self) -> list[str]:
        if self.longest_request or self.share.num_parameters is None:
            return []
        for bits in _WEIGHT_BITS:
            # Half a bit is for scales.
            num_bytes = int(self.share.num_parameters * (bits + 0.5) / 8)
            if num_bytes < min(self.weight_bytes, self.memory_bytes - self.reserved_bytes):
                return [f"a checkpoint with weights of {bits} bits, about {num_bytes / 2**30:.1f} GiB"]
        return []
