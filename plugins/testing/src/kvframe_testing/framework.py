"""The functions of the host that plugins' tests call: they do to a plugin what an engine does to it."""

from __future__ import annotations

from kvframe.attention.padding import pad_metadata
from kvframe.attention.staging import Staging
from kvframe.attention.state import state_step
from kvframe.attention.wrapping import apply_chain, apply_wrapper
from kvframe.config.choices import check_order
from kvframe.planning.layer_file import read_layer_file
from kvframe.selection.choice import WrapperChain, bind_chain
from kvframe.selection.select import select_backends

__all__ = [
    "Staging",
    "WrapperChain",
    "apply_chain",
    "apply_wrapper",
    "bind_chain",
    "check_order",
    "pad_metadata",
    "read_layer_file",
    "select_backends",
    "state_step",
]
