"""``kvframe check`` finds the kinds of mistakes of a list, and nothing in parts without one."""

from __future__ import annotations

import pytest

from tests.covering import few, keep
from tests.testing.mistakes.backend import RightBackend
from tests.testing.mistakes.finding import find
from tests.testing.mistakes.kinds import Kind, all_kinds
from tests.testing.mistakes.specs import RightSpec
from tests.testing.mistakes.wrappers import RightWrapper

KINDS = all_kinds()
FOUND = [name for name, mistake in KINDS.items() if not mistake.missed]


def test_most_kinds_are_found() -> None:
    assert 94 <= len(KINDS)
    assert len(FOUND) / len(KINDS) > 0.92


@pytest.mark.parametrize(
    "name",
    few(8, FOUND),
)
def test_a_mistake_is_found(name: str) -> None:
    assert find(KINDS[name])


@pytest.mark.parametrize("part", keep([RightBackend, RightSpec, RightWrapper], RightSpec, RightWrapper))
def test_nothing_is_found_in_a_part_without_a_mistake(part: type) -> None:
    assert not find(Kind(name="none", part=part))
