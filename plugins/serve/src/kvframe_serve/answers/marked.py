"""Formats that are described by their marks, and the parser of all of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import groupby

import attrs

from kvframe_serve.answers.calls import CallReader
from kvframe_serve.answers.format import AnswerFormat, AnswerParser, Content, Part, Reasoning, ToolCall, Tools
from kvframe_serve.answers.marks import Marks, marks_of

_BRACKETS = frozenset("{}[]")


@attrs.frozen
class Quote:
    """What holds no marks of a call: a string of JSON, the value of a parameter.

    Attributes:
        open: The mark at its beginning.
        closes: The marks at its end.
        escapes: Marks within it that contain one of ``closes`` and do not end it.
    """

    open: str
    closes: tuple[str, ...]
    escapes: tuple[str, ...] = ()


JSON_STRING = Quote('"', ('"', "\n"), (r"\\", r"\""))
"""JSON has no line break within a string, so that a missing quote does not take the rest of an answer."""


@attrs.frozen(kw_only=True)
class CallMarks:
    """How a call is marked.

    Attributes:
        open: The mark before it.
        closes: The marks after it. If there are none, it ends with the bracket that closes its first one.
        begins: What can follow ``open``, without white space; ``{name}`` stands for any offered tool. Other text is no
            call, which is known at its first character.
        read: Reads the text between the marks.
        quotes: What holds no marks.
        inner: Other marks that are part of it.
        is_first: Whether only text that follows no content is a call.
        needs_close: Whether a call without a mark after it is cut: its text does not show that arguments are missing.
        ends_reasoning: Whether it ends the reasoning. Otherwise a call within reasoning is text of the reasoning.
    """

    open: str
    closes: tuple[str, ...] = ()
    begins: tuple[str, ...]
    read: CallReader
    quotes: tuple[Quote, ...] = (JSON_STRING,)
    inner: tuple[str, ...] = ()
    is_first: bool = False
    needs_close: bool = False
    ends_reasoning: bool = False

    @property
    def marks(self) -> frozenset[str]:
        """All marks outside of quotes."""
        brackets = frozenset() if self.closes else _BRACKETS
        return brackets.union((self.open,), self.closes, self.inner, (quote.open for quote in self.quotes))


@attrs.frozen(kw_only=True)
class MarkedFormat(AnswerFormat):
    """A format that is described by its marks.

    White space beside the marks of reasoning and of calls is layout of the template, and is left out.

    Attributes:
        has: Texts of which a chat template has at least one.
        lacks: Texts of which it has none.
        opens: The marks before reasoning.
        ends: The marks after it.
        is_first: Whether reasoning follows no content. Then its marks are plain words later.
        calls: The ways to mark a call.
        layout: Marks that are left out beside a call, and are text elsewhere: those around several calls.
        dropped: Marks that are left out anywhere.
    """

    has: tuple[str, ...]
    lacks: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    is_first: bool = True
    calls: tuple[CallMarks, ...] = ()
    layout: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    _mark_sets: dict[tuple[frozenset[str], bool], _MarkSets] = attrs.field(
        init=False, factory=dict, eq=False, repr=False
    )

    @property
    def has_calls(self) -> bool:
        """As for the base class."""
        return bool(self.calls)

    def matches(self, template: str) -> bool:
        """As for the base class."""
        return any(text in template for text in self.has) and not any(text in template for text in self.lacks)

    def opens_reasoning(self, prompt: str) -> bool:
        """As for the base class."""
        return prompt.rstrip().endswith(self.opens) if self.opens else False

    def parser(
        self, *, reasoning: bool, tools: Tools | None, in_reasoning: bool, special: Collection[str]
    ) -> AnswerParser:
        """As for the base class."""
        key = (frozenset(special), bool(tools))
        if key not in self._mark_sets:
            self._mark_sets[key] = _MarkSets(self, *key)
        return _MarkedParser(self, self._mark_sets[key], reasoning, tools or {}, in_reasoning)

    @property
    def marks(self) -> frozenset[str]:
        """All marks that can be part of a text."""
        return frozenset().union(self.opens, self.ends, self.layout, self.dropped, *(call.marks for call in self.calls))


class _MarkSets:
    """The marks of a format and of one tokenizer, which may have a thousand special tokens: made once for all answers.

    Attributes:
        dropped: The marks that are left out anywhere; their texts are ``dropped_texts``.
        content: The marks within content.
        reasoning: The marks within reasoning.
        calls: How calls are marked, by the mark before them.
    """

    def __init__(self, form: MarkedFormat, special: frozenset[str], has_tools: bool) -> None:
        calls = {call.open: call for call in form.calls} if has_tools else {}
        layout = form.layout if has_tools else ()
        dropped_marks = special.difference(form.marks).union(form.dropped)
        ending = [mark for mark, call in calls.items() if call.ends_reasoning]
        self.dropped_texts = dropped_marks
        self.dropped = Marks(dropped_marks)
        self.content = Marks(dropped_marks.union(calls, layout, form.opens))
        self.reasoning = Marks(dropped_marks.union(ending, layout, form.opens, form.ends))
        self.calls = {mark: _CallSyntax(call, dropped_marks.union(calls)) for mark, call in calls.items()}


class _MarkedParser(AnswerParser):
    """Goes from mark to mark. It is within content, reasoning or a call, and each has its own set of marks."""

    def __init__(self, form: MarkedFormat, sets: _MarkSets, separates: bool, tools: Tools, in_reasoning: bool) -> None:
        self._form, self._sets, self._separates, self._tools = form, sets, separates, tools
        self._text = ""
        self._parts: list[Part] = []
        self._in_reasoning = in_reasoning
        self._call: _OpenCall | None = None
        self._begins: dict[str, Sequence[str]] = {}
        # White space and layout that belong to the text if no mark follows.
        self._pending: list[str] = []
        self._follows_mark = in_reasoning and separates
        self._follows_call = False
        self._follows_content = False

    def feed(self, text: str) -> list[Part]:
        self._advance(text, is_whole=False)
        return self._take_parts()

    def finish(self) -> list[Part]:
        self._advance("", is_whole=True)
        if self._call is not None:
            self._end_call(self._call, "")
        self._emit("")
        return self._take_parts()

    def _take_parts(self) -> list[Part]:
        parts: list[Part] = []
        for kind, group in groupby(self._parts, type):
            if kind is ToolCall:
                parts += group
            else:
                parts.append(kind("".join(part.text for part in group if not isinstance(part, ToolCall))))
        self._parts = []
        return parts

    def _advance(self, new_text: str, *, is_whole: bool) -> None:
        text = self._text + new_text
        position, is_searched = 0, False
        while not is_searched:
            call = self._call
            begin, mark = self._marks().find(text, position, is_whole)
            if call is None:
                self._add_text(text[position:begin])
                position = begin + len(mark)
                is_searched = not mark
                if mark:
                    self._meet(mark)
                continue
            num_fitting = call.add(text[position:begin])
            position += num_fitting
            if position < begin:
                self._give_up(call)
            elif mark:
                position += self._meet_in_call(call, mark)
            else:
                is_searched = True
        self._text = text[position:]

    def _marks(self) -> Marks:
        if self._call is not None:
            return self._call.marks
        return self._sets.reasoning if self._in_reasoning else self._sets.content

    def _meet(self, mark: str) -> None:
        form = self._form
        call = self._sets.calls.get(mark)
        if self._in_reasoning and mark in form.ends:
            self._change_reasoning(mark)
        elif call is not None and not (call.form.is_first and (self._follows_content or self._in_reasoning)):
            self._call = _OpenCall(call, self._tools, self._begins_of(call.form))
        elif mark in form.opens and self._in_reasoning and self._follows_mark:
            pass  # the prompt opened the reasoning, and the model has repeated it
        elif mark in form.opens and not self._in_reasoning and not (form.is_first and self._follows_content):
            self._change_reasoning(mark)
        elif mark in form.layout:
            if not self._follows_call:
                self._pending.append(mark)
        elif mark not in self._sets.dropped_texts:
            self._emit(mark)

    def _begins_of(self, form: CallMarks) -> Sequence[str]:
        """Return what can follow the mark before a call, sorted; a client may offer thousands of tools."""
        if form.open not in self._begins:
            begins = [begin.replace("{name}", name) for begin in form.begins for name in self._tools]
            self._begins[form.open] = sorted({"".join(begin.split()) for begin in begins})
        return self._begins[form.open]

    def _change_reasoning(self, mark: str) -> None:
        if self._separates:
            self._pending = []
            self._follows_mark, self._follows_call = True, False
        else:
            self._emit(mark)
        self._in_reasoning = not self._in_reasoning
        self._follows_content = False

    def _add_text(self, text: str) -> None:
        if self._follows_mark:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._emit(body)
        if text[len(body) :]:
            self._pending.append(text[len(body) :])

    def _emit(self, text: str) -> None:
        """Add text, and the pending text before it, to the content or the reasoning."""
        text = "".join((*self._pending, text))
        self._pending = []
        if text:
            is_reasoning = self._in_reasoning and self._separates
            self._parts.append(Reasoning(text) if is_reasoning else Content(text))
            self._follows_mark = self._follows_call = False
            self._follows_content = not self._in_reasoning

    def _meet_in_call(self, call: _OpenCall, mark: str) -> int:
        """Return how many characters of a mark are read."""
        if call.quote is None and mark in call.syntax.form.closes:
            self._end_call(call, mark)
            return len(mark)
        if call.quote is None and mark in call.syntax.others:
            self._end_call(call, "")
            return 0
        num_fitting = call.add(mark)
        if num_fitting < len(mark):
            self._give_up(call)
        elif call.note(mark):
            self._end_call(call, "")
        return num_fitting

    def _end_call(self, call: _OpenCall, close: str) -> None:
        calls = call.read() if close or not call.syntax.form.needs_close else []
        if not calls:
            call.texts.append(close)
            self._give_up(call)
            return
        self._call = None
        self._pending = []
        self._parts += calls
        self._follows_mark = self._follows_call = True
        self._follows_content = self._in_reasoning = False

    def _give_up(self, call: _OpenCall) -> None:
        self._call = None
        self._emit(self._sets.dropped.remove("".join(call.texts)))


class _CallSyntax:
    """How a call is marked, and which other marks are no part of it."""

    def __init__(self, form: CallMarks, other_marks: frozenset[str]) -> None:
        self.form = form
        self.others = other_marks - form.marks.difference((form.open,)) - _BRACKETS
        self.outside_quotes = Marks(form.marks | self.others)


class _OpenCall:
    """The text of a call that has not ended."""

    def __init__(self, syntax: _CallSyntax, tools: Tools, begins: Sequence[str]) -> None:
        self.syntax = syntax
        self.texts = [syntax.form.open]
        self.quote: Quote | None = None
        self._tools = tools
        self._begins = begins
        self._depth = int(syntax.form.open in _BRACKETS)
        # The text so far without white space, until it is what a call begins with.
        self._begin: str | None = ""

    @property
    def marks(self) -> Marks:
        """The marks that can come next."""
        quote = self.quote
        return self.syntax.outside_quotes if quote is None else marks_of(frozenset((*quote.closes, *quote.escapes)))

    def add(self, text: str) -> int:
        """Add text, up to the character with which it is no call, and return how many characters were added."""
        num_fitting = len(text)
        for index, character in enumerate(text if self._begin is not None else ""):
            if character.isspace():
                continue
            begin = f"{self._begin}{character}"
            next_begin = bisect_left(self._begins, begin)
            following = self._begins[next_begin] if next_begin < len(self._begins) else ""
            if begin == following:
                self._begin = None
                break
            if not following.startswith(begin):
                num_fitting = index
                break
            self._begin = begin
        self.texts.append(text[:num_fitting])
        return num_fitting

    def note(self, mark: str) -> bool:
        """Note a mark that was added, and return whether it closes the first bracket."""
        if self.quote is not None:
            if mark in self.quote.closes:
                self.quote = None
            return False
        self.quote = next((quote for quote in self.syntax.form.quotes if quote.open == mark), None)
        if self.syntax.form.closes or mark not in _BRACKETS:
            return False
        self._depth += 1 if mark in "{[" else -1
        return self._depth <= 0

    def read(self) -> list[ToolCall]:
        """Return the calls; none if the text is no call of offered tools."""
        try:
            calls = self.syntax.form.read("".join(self.texts[1:]), self._tools)
        except (ValueError, RecursionError):  # JSON that is nested too deeply
            return []
        return calls if all(call.name in self._tools for call in calls) else []
