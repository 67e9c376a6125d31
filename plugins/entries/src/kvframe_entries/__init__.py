"""Entries for kvframe: what attention layers keep beside keys and values."""

from kvframe_entries.spec import TokenEntriesSpec, UnfinishedGroupSpec

__all__ = ["TokenEntriesSpec", "UnfinishedGroupSpec"]
