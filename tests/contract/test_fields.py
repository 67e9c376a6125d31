"""Validators of fields: what is right passes, and what is wrong is refused by the name of the class and the field."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from kvframe.contract import SpecError, UnknownNameError, known_dtype, must_be, positive_int, whole_number


@attrs.frozen(kw_only=True)
class Sizes:
    window: int = positive_int
    sinks: int = attrs.field(default=0, validator=whole_number(0))
    dtype: str = attrs.field(default="float32", validator=known_dtype)
    side: str = attrs.field(
        default="left", validator=must_be("left or right", lambda value: value in ("left", "right"))
    )


def test_right_values_pass() -> None:
    assert (1, 0, "int8", "right") == attrs.astuple(Sizes(window=1, dtype="int8", side="right"))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window": 0}, "Sizes.window must be a whole number of at least 1, not 0"),
        ({"window": True}, "Sizes.window must be a whole number of at least 1, not True"),
        ({"window": 2.0}, "Sizes.window must be a whole number of at least 1, not 2.0"),
        ({"window": 1, "sinks": -1}, "Sizes.sinks must be a whole number of at least 0, not -1"),
        ({"window": 1, "side": "top"}, "Sizes.side must be left or right, not 'top'"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError) as refused:
        Sizes(**options)
    assert sentence == str(refused.value)


def test_an_unknown_dtype_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'float16'"):
        Sizes(window=1, dtype="flaot16")
