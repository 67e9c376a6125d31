"""What ranks compare before they serve: the versions of their packages, and their models' configs and weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, requires, version

import attrs
import torch
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kvframe.contract.errors import ModelError, listed, shorten
from kvframe.contract.model import LoadedModel
from kvframe_engine.contract.errors import EngineError

NUM_SAMPLES, SAMPLE_BYTES = 4, 256
"""Of a tensor, the bytes at the start of 4 equal parts and at the end are compared. They show weights of another
training, and no change of a few single numbers. More parts would take longer, because each may be on a page of a file
that was not read yet."""


@attrs.frozen(kw_only=True)
class Fingerprint:
    """What has to be equal on all ranks, so that they compute parts of one model.

    Attributes:
        model: The model's name.
        versions: By distribution, the version that is installed; empty if it is unknown.
        config: Everything besides the weights that determines the model's output.
        weights: By name, a digest of a weight's dtype, shape and samples.
    """

    model: str
    versions: Mapping[str, str]
    config: str
    weights: Mapping[str, bytes]

    @classmethod
    def of(cls, model: LoadedModel, plugins: Mapping[str, str]) -> Fingerprint:
        """Return the fingerprint of this rank.

        Args:
            model: The loaded model.
            plugins: By distribution, the version of each loaded plugin.

        Raises:
            ModelError: The adapter does not identify the model.
        """
        identity = model.identity()
        if identity is None:
            raise ModelError(
                f"{model.description.name} cannot run over several ranks: its adapter ({type(model).__name__}) has no "
                "identity(), so the ranks cannot find out whether they have the same weights; run one process"
            )
        return cls(
            model=model.description.name,
            versions=versions_of(plugins),
            config=identity.config,
            weights={name: _digest(tensor) for name, tensor in identity.weights.items()},
        )

    def version_of(self, distribution: str) -> str:
        """Return a version for a sentence."""
        return self.versions.get(distribution, "(missing)") or "(of no known version)"


def versions_of(plugins: Mapping[str, str]) -> dict[str, str]:
    """Return the versions of plugins, of the distributions that they need, and of torch.

    Args:
        plugins: By distribution, the version of each loaded plugin.
    """
    libraries = {torch.__name__}.union(*(_needs_of(name) for name in plugins if name != "kvframe"))
    versions = {name: _version_of(name) for name in libraries} | dict(plugins)
    return {canonicalize_name(name): version for name, version in versions.items()}


def check_equal(fingerprints: Sequence[Fingerprint]) -> None:
    """Check the fingerprints of all ranks, by rank.

    Raises:
        EngineError: Two ranks have other packages (``ranks_differ``).
        ModelError: Two ranks have other models, or a model with another config or other weights.
    """
    first = fingerprints[0]
    for rank, fingerprint in enumerate(fingerprints):
        names = _differing(first.versions, fingerprint.versions)
        if names:
            packages = (f"{name} {fingerprint.version_of(name)} instead of {first.version_of(name)}" for name in names)
            raise EngineError(
                f"rank {rank} has other packages than rank 0: {listed(packages)}; install the same packages on all "
                "machines",
                code="ranks_differ",
            )
        if fingerprint.config != first.config:
            excerpts = _excerpts(fingerprint.config, first.config)
            raise ModelError(
                f"rank {rank} has another config of {fingerprint.model} than rank 0: {excerpts}; give all ranks the "
                "same checkpoint"
            )
        names = _differing(first.weights, fingerprint.weights)
        if names:
            raise ModelError(
                f"rank {rank} has other weights of {fingerprint.model} than rank 0: {listed(names, 3)}; give all ranks "
                "the same checkpoint"
            )


def _needs_of(distribution: str) -> Iterable[str]:
    """Return the distributions that another one needs in any case; none for a plugin that was passed as a module."""
    try:
        needs = [Requirement(line) for line in requires(distribution) or ()]
    except (PackageNotFoundError, InvalidRequirement):
        return ()
    return [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _digest(tensor: torch.Tensor) -> bytes:
    """Return a digest of a tensor's dtype and shape and of its samples."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    num_apart = data.numel() // NUM_SAMPLES
    if num_apart > SAMPLE_BYTES:
        parts = data[: num_apart * NUM_SAMPLES].view(NUM_SAMPLES, num_apart)
        data = torch.cat([parts[:, :SAMPLE_BYTES].reshape(-1), data[-SAMPLE_BYTES:]])
    header = f"{tensor.dtype} {tuple(tensor.shape)} "
    return blake2b(header.encode() + data.cpu().numpy().tobytes(), digest_size=16).digest()


def _differing(first_digests: Mapping[str, object], other_digests: Mapping[str, object]) -> list[str]:
    names = first_digests.keys() | other_digests.keys()
    return sorted(name for name in names if first_digests.get(name) != other_digests.get(name))


def _excerpts(config: str, first: str) -> str:
    """Return the parts of two texts around the first character that differs."""
    pairs = enumerate(zip(config, first, strict=False))
    start = next(
        (index for index, (own_char, first_char) in pairs if own_char != first_char), min(len(config), len(first))
    )
    start = max(config.rfind(end, 0, start) for end in ",{\n") + 1
    own_excerpt, first_excerpt = (shorten(text[start:].lstrip().partition(",")[0]) for text in (config, first))
    return f"{own_excerpt} instead of {first_excerpt}"
