"""Calls of foreign code: its exceptions are contained, and its texts are made safe to print."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from kvframe.contract.errors import PluginError, SpecError, WrapperError
from kvframe.contract.foreign import MAX_CHARACTERS, call, in_one_line, safe_repr, safe_text


class Own(BaseException):
    """A plugin's own exception, which ``except Exception`` does not catch."""


class Mute(Exception):
    """An object whose text and value cannot be read."""

    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class MuteSpecError(SpecError):
    """An error of the contract whose text cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Number(Exception):
    """An object whose text is a number."""

    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # the mistake that is tested


class Nameless(type):
    """A metaclass whose classes compute their name."""

    @property
    def __name__(cls) -> str:
        raise SystemExit(3)


class Unnamed(Exception, metaclass=Nameless):
    """An object whose class computes its name."""


class Text(str):
    """A text with methods of its own."""

    def __len__(self) -> int:
        raise SystemExit(3)

    def split(self, *arguments: Any) -> NoReturn:
        raise SystemExit(3)

    __getitem__ = __str__ = __iter__ = split


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail


def too_deep() -> Any:
    return too_deep()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raising(ValueError("no\n  idea")), "ValueError: no idea"),
        (raising(SystemExit("giving up")), "SystemExit: giving up"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (raising(GeneratorExit()), "GeneratorExit"),
        (raising(Own("mine")), "Own: mine"),
        (raising(BaseExceptionGroup("all", [KeyboardInterrupt()])), "BaseExceptionGroup: all (1 sub-exception)"),
        (raising(MemoryError()), "MemoryError"),
        (raising(Mute()), "Mute: <str() of Mute raises SystemExit>"),
        (raising(Number()), "Number: <str() of Number raises TypeError>"),
        (raising(Unnamed("hello")), "Unnamed: hello"),
        (raising(PluginError("a sentence")), "PluginError: a sentence"),
        (too_deep, "RecursionError: maximum recursion depth exceeded"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_foreign_code_raises_becomes_one_plugin_error(function: Callable[[], Any], text: str) -> None:
    with pytest.raises(PluginError) as caught:
        call("backend 'x': unusable_reason()", function)
    assert f"backend 'x': unusable_reason() failed: {text}" == str(caught.value)
    assert caught.value.__cause__ is not None


def test_an_interrupt_is_the_users_and_passes() -> None:
    with pytest.raises(KeyboardInterrupt):
        call("it", raising(KeyboardInterrupt()))


def test_an_interrupt_passes_while_a_text_is_read() -> None:
    class Interrupted(Exception):
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call("it", raising(Interrupted()))


def test_an_answer_and_arguments_are_handed_on() -> None:
    assert {"a": 1, "b": 2} == call("it", dict, [("a", 1)], b=2)


def test_an_error_that_the_contract_allows_passes_as_it_is() -> None:
    error = WrapperError("no window", code="no_window")
    with pytest.raises(WrapperError) as caught:
        call("it", raising(error), passes=(WrapperError, SpecError))
    assert caught.value is error


def test_an_allowed_error_whose_text_cannot_be_read_does_not_pass() -> None:
    with pytest.raises(PluginError, match=r"it failed: MuteSpecError: <str\(\) of MuteSpecError raises ValueError>"):
        call("it", raising(MuteSpecError()), passes=(SpecError,))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("  a\n\tb  ", "a b"),
        ("\x1b[31mred\x00", r"\x1b[31mred\x00"),
        ("left\u202eright", r"left\u202eright"),
        ("a\udc80b", r"a\udc80b"),
        ("Größe 2 µs", "Größe 2 µs"),
        ("", ""),
    ],
)
def test_a_line_has_printable_characters_only(text: str, line: str) -> None:
    assert line == in_one_line(text)


@pytest.mark.parametrize("length", [MAX_CHARACTERS + 1, 10_000_000])
def test_a_long_text_is_cut_and_says_so(length: int) -> None:
    line = in_one_line("x" * length)
    assert f"{'x' * MAX_CHARACTERS}... ({length - MAX_CHARACTERS} more characters)" == line


def test_a_text_of_just_the_length_is_kept() -> None:
    assert "x" * MAX_CHARACTERS == in_one_line("x" * MAX_CHARACTERS)


def test_a_value_that_cannot_be_shown_says_so() -> None:
    assert "<repr() of Mute raises SystemExit>" == safe_repr(Mute())
    assert "'a\\nb'" == safe_repr("a\nb")


def test_a_text_with_methods_of_its_own_is_read_without_them() -> None:
    assert "hello" == in_one_line(Text("hello"))


def test_an_error_without_a_message_is_its_type() -> None:
    assert "ValueError" == safe_text(ValueError())
