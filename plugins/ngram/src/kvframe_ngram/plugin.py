"""The manifest: it registers the proposer of this distribution by import string."""

from __future__ import annotations

from kvframe.contract import Register, hookimpl


@hookimpl
def kvframe_register_proposers(register: Register) -> None:
    """Register the proposer."""
    register("ngram", "kvframe_ngram.proposer:NgramProposer")
