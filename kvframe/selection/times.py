"""Measured times of backends: a small table that ``kvframe tune`` writes and ``backend = "auto"`` reads.

A time holds for one device, one release of torch, one version of a backend and one shape of a layer. It is not used for
anything else.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import torch
from attrs.validators import instance_of
from platformdirs import user_cache_path

from kvframe.config.files import check_place, exists, read_json, write_text
from kvframe.contract.errors import FileError, StackError, shorten, shown
from kvframe.contract.specs import LayerSpec
from kvframe.contract.wrapper import DROPS_TOKENS, MetadataWrapper

FORMAT = 1
"""The version of the table's file."""

WEIGHTS: Mapping[str, float] = {"decode": 0.6, "prefill": 0.2, "mixed": 0.2}
"""The kinds of batches that are measured, and their weights, which add up to 1."""

_log = logging.getLogger("kvframe")


@attrs.frozen
class TimeKey:
    """The conditions that a time holds for.

    Attributes:
        device: The device's own name (``device_name``).
        torch: The release of torch.
        layer: The layer's shape (``layer_shape``).
        backend: The backend's registered name, with its distribution.
        version: The distribution's version; empty for a module without a distribution.
    """

    device: str = attrs.field(validator=instance_of(str))
    torch: str = attrs.field(validator=instance_of(str))
    layer: str = attrs.field(validator=instance_of(str))
    backend: str = attrs.field(validator=instance_of(str))
    version: str = attrs.field(validator=instance_of(str))


@attrs.frozen
class MeasuredTime:
    """The measured time of a layer.

    Attributes:
        seconds: Per step and layer, by kind of batch: all of ``WEIGHTS``.
    """

    seconds: Mapping[str, float]

    @property
    def score(self) -> float:
        """The weighted geometric mean of the times, in seconds, by which backends are compared.

        A speed-up by a factor counts the same in a slow kind of batch as in a fast one.
        """
        return math.exp(sum(weight * math.log(self.seconds[kind]) for kind, weight in WEIGHTS.items()))


@attrs.frozen
class TimesTable:
    """A table of measured times.

    Attributes:
        times: The times.
        notes: The layer that each shape stands for, in words.
    """

    times: Mapping[TimeKey, MeasuredTime] = attrs.field(factory=dict)
    notes: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def read(cls, path: Path) -> TimesTable:
        """Read a table.

        Raises:
            ValueError: The file cannot be read, is not such a table, or has another version; the message says why.
        """
        try:
            data = read_json(path)
            if data["format"] != FORMAT:
                raise ValueError(f"it has the format {shown(data['format'])}, and this kvframe reads {FORMAT}")
            times = {TimeKey(**entry["key"]): _as_time(entry["seconds"]) for entry in data["times"]}
            return cls(times, {str(shape): str(note) for shape, note in data["layers"].items()})
        except FileError as error:
            raise ValueError(f"it {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"it is not a table of measured times ({type(error).__name__}: {shorten(str(error))})"
            ) from error

    def with_times(self, times: Mapping[TimeKey, MeasuredTime], notes: Mapping[str, str]) -> TimesTable:
        """Return the table with further times; each replaces a time whose key differs at most in its versions."""
        fresh = {attrs.evolve(key, version="", torch="") for key in times}
        kept = {key: time for key, time in self.times.items() if attrs.evolve(key, version="", torch="") not in fresh}
        return TimesTable({**kept, **times}, {**self.notes, **notes})

    def write(self, path: Path) -> None:
        """Write the whole table; raise ``FileError`` if the file cannot be written."""
        data = {
            "format": FORMAT,
            "weights": dict(WEIGHTS),
            "layers": dict(self.notes),
            "times": [
                {"key": attrs.asdict(key), "seconds": dict(time.seconds)}
                for key, time in sorted(self.times.items(), key=lambda item: attrs.astuple(item[0]))
            ],
        }
        write_text(path, json.dumps(data, indent=1) + "\n")


def check_table_place(path: Path) -> None:
    """Raise if ``TimesTable.write`` could not write a file, or would replace another kind of file.

    Raises:
        FileError: The sentence lacks its subject, the file.
    """

    def is_table(path: Path) -> bool:
        try:
            TimesTable.read(path)
        except ValueError as error:
            raise FileError(f"is not overwritten: {error}; name another file, or remove it first") from error
        return True

    check_place(path, is_table)


def _as_time(seconds: Mapping[str, Any]) -> MeasuredTime:
    found = {kind: seconds[kind] for kind in WEIGHTS}
    if not all(isinstance(value, int | float) and 0 < value < math.inf for value in found.values()):
        raise TypeError(f"times must be finite and above 0, not {dict(seconds)}")
    return MeasuredTime({kind: float(value) for kind, value in found.items()})


def in_words(time: MeasuredTime) -> str:
    """Return a measured time as text."""
    return ", ".join(f"{kind} {1e3 * seconds:.3g} ms" for kind, seconds in time.seconds.items())


def default_path() -> Path:
    """Return the path of the user's table: ``KVFRAME_TIMES``, or a file in the user's cache folder."""
    if chosen := os.environ.get("KVFRAME_TIMES"):
        return Path(chosen)
    return user_cache_path("kvframe", appauthor=False) / "times.json"


def read_times(chosen: bool | str, source: str) -> TimesTable:
    """Return the table that a stack's ``[engine] measured_times`` names.

    The user's own table is optional: if it cannot be read, a warning is logged, and it is ignored.

    Args:
        chosen: True for the user's table, False for none, or a file.
        source: Where the stack was read, for errors.

    Raises:
        StackError: The file that the stack names cannot be read.
    """
    if chosen is False:
        return TimesTable()
    path = default_path() if chosen is True else Path(chosen)
    try:
        if chosen is True and not exists(path):
            return TimesTable()
        return TimesTable.read(path)
    except (FileError, ValueError) as error:
        if chosen is not True:
            raise StackError(f"{source}: engine.measured_times is {shown(chosen)}: {error}") from error
        _log.warning(
            "kvframe: measured times are ignored, %s: %s; remove it, and `kvframe tune` writes another", path, error
        )
        return TimesTable()


def layer_shape(layer: LayerSpec, wrappers: Iterable[MetadataWrapper]) -> str:
    """Return the properties of a layer that decide how long attention takes, as text that is equal for equal shapes.

    A wrapper that drops tokens is left out: the other tokens cost as much as before.

    Args:
        layer: The layer after its wrapper chain; its name and its ``shares_with`` do not matter.
        wrappers: The chain.
    """
    chain = [repr(wrapper) for wrapper in wrappers if DROPS_TOKENS not in wrapper.effects]
    described = repr((type(layer.spec).__module__, layer.spec, layer.query, chain))
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def time_key(device: str, shape: str, backend: str) -> TimeKey:
    """Return the key of a time that is measured, or looked up, in this process.

    Args:
        device: The device (``"cpu"``, ``"cuda:0"``).
        shape: What ``layer_shape`` returned.
        backend: The backend's registered name, with its distribution.
    """
    return TimeKey(device_name(device), str(torch.__version__), shape, backend, _version(backend.rpartition(":")[0]))


def device_name(device: str) -> str:
    """Return a device's own name, with other properties that decide its speed; its type if it does not exist."""
    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(torch.device(device))
    if device.partition(":")[0] != "cpu":
        return device.partition(":")[0]
    return f"{_processor()}, {torch.get_num_threads()} threads"


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names: Sequence[str] = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine() or "cpu"


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
