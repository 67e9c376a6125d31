"""The processor time of the processes that serve on Ray, which are all children of the one that started Ray."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from benchmarks.serving.running import with_children

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_REPLICA = "ray::ServeReplica:"


def processor_seconds() -> dict[str, float]:
    """Return the processor time of each deployment (``"app:Engine"``), and of all processes (``"all"``)."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in with_children(os.getpid()):
        with suppress(FileNotFoundError, ProcessLookupError):
            title = Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace")
            # Fields from the third on, after the process's name in brackets; the 14th and 15th are user and system.
            _, _, fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            process_seconds = sum(map(int, fields.split()[11:13])) / _TICKS_PER_SECOND
            seconds["all"] += process_seconds
            if title.startswith(_REPLICA):
                name = title.removeprefix(_REPLICA).split(".")[0].strip("\0 ")
                seconds[name] += process_seconds
    return seconds
