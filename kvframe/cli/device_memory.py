"""What ``kvframe plan --memory`` says: whether a model starts on a device, its longest request, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from kvframe.cli.render import format_bytes, print_facts, print_note
from kvframe.contract.errors import StackError
from kvframe.contract.sizes import parse_bytes

if TYPE_CHECKING:
    from kvframe.hosting.device_plan import DevicePlan

NOTHING_FITS_EXIT_CODE = 1
"""Ends ``kvframe plan`` if the model does not start on the device."""


class SizeType(click.ParamType[int | str]):
    """A size in bytes, such as ``80GB``; or ``auto``, if the option takes it."""

    name = "size"

    def __init__(self, *, takes_auto: bool = False) -> None:
        """Say whether ``auto`` is a value."""
        self._takes_auto = takes_auto

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """Return the number of bytes, or ``auto``; fail if it is neither."""
        if self._takes_auto and value == "auto":
            return "auto"
        try:
            return parse_bytes(int(value) if str(value).isdecimal() else value)
        except (StackError, ValueError) as error:  # ValueError: more digits than Python converts
            self.fail(str(error), param, ctx)


def device_to_dict(device: DevicePlan) -> dict[str, Any]:
    """Return what a device holds, and the decision, as plain values for JSON and for the page."""
    share = device.share
    return {
        "num_ranks": device.num_ranks,
        "memory_bytes": device.memory_bytes,
        "weight_bytes": device.weight_bytes,
        "weights": share.weights,
        "reserved_bytes": device.reserved_bytes,
        "cache_bytes": max(0, device.cache_bytes),
        "starts": device.longest_request > 0,
        "longest_request": device.longest_request,
        "changes": list(device.changes),
        "notes": notes_of(device),
    }


def notes_of(device: DevicePlan) -> list[str]:
    """Return what is to be known besides, one sentence each."""
    notes = list(device.share.lacks)
    if device.share.refusal is not None:
        notes.append(
            f"kvframe's own engine does not start it so: {device.share.refusal}; the plan is for an engine of which "
            "several ranks have the same key-value head"
        )
    if device.whole.drafts.are_heads:
        notes.append("the weights of the prediction heads, which the stack's proposer runs, are not counted")
    return notes


def print_device(device: DevicePlan) -> None:
    """Print what a device's memory holds, and whether the model starts."""
    share, longest = device.share, device.longest_request
    owner = "the device" if device.num_ranks == 1 else f"each of {device.num_ranks}"
    max_model_len = device.setup.max_model_len
    verdict = [("starts", "yes"), ("longest request", f"{longest:,} of {max_model_len:,} tokens")]
    if not longest:
        taken_bytes = device.weight_bytes + device.reserved_bytes
        verb = "take" if device.cache_bytes <= 0 else "leave too little for a cache: they take"
        verdict = [("starts", f"no: the weights and the reserve {verb} {format_bytes(taken_bytes)}")]
    print_facts(
        "Device",
        [
            (owner, f"{format_bytes(device.memory_bytes)} ({device.memory_bytes:,} bytes)"),
            ("weights", f"{format_bytes(device.weight_bytes)}: {share.weights}".removesuffix(": ")),
            ("reserve", f"{format_bytes(device.reserved_bytes)} for activations and the runtime (--reserve)"),
            ("cache", format_bytes(max(0, device.cache_bytes))),
            *verdict,
        ],
    )
    changes = device.changes
    if changes:
        purpose = "" if longest else " so that it starts"
        print_facts(
            f"What to change{purpose}, one of", [(str(index), change) for index, change in enumerate(changes, 1)]
        )
    elif not longest:
        print_note("no number of ranks up to 64 and no format lets it start; a device with more memory does")
    for note in notes_of(device):
        print_note(note)


def print_how_to_run(device: DevicePlan) -> None:
    """Print the option that gives a run the planned memory."""
    if device.plan is not None and device.plan.groups:
        print_note(f"a run gets this cache by --memory {device.cache_bytes >> 20}MiB")
