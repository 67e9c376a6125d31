"""Formats of answers: reasoning and calls are found in any division of a text, and nothing of it is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import entry_points
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kvframe_serve.answers import Content, Part, Reasoning, ToolCall, find_format, marked
from kvframe_serve.answers.marked import MarkedFormat

from kvframe.contract import KVFrameError, StackError

BAR, BLOCK = "\uff5c", "\u2581"
TOOLS: dict[str, dict[str, Any]] = {
    "weather": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    "time": {},
}
ROME = '{"city": "Rome", "days": 2}'


def deepseek(text: str) -> str:
    return text.replace("|", BAR).replace("_", BLOCK)


CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>',
    "qwen_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>"
    ),
    "mistral": f"[TOOL_CALLS]weather[ARGS]{ROME}",
    "llama": f'{{"name": "weather", "parameters": {ROME}}}',
    "deepseek": deepseek("<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>weather\n```json\n")
    + ROME
    + deepseek("\n```<|tool_call_end|><|tool_calls_end|>"),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{ROME}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "function_gemma": "<start_function_call>call:weather{city:<escape>Rome<escape>,days:2}<end_function_call>",
    "gemma": '<|tool_call>call:weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>',
    "harmony": (f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}<|call|>"),
}
"""A call of the same tool with the same arguments, as models of each format write it."""

REASONING = {
    "think": "<think>\nI count.\n</think>\n\nThree.",
    "hermes": "<think>\nI count.\n</think>\n\nThree.",
    "qwen_coder": "<think>\nI count.\n</think>\n\nThree.",
    "glm": "<think>I count.</think>\nThree.",
    "mistral": "[THINK]I count.[/THINK]Three.",
    "deepseek": "<think>\nI count.\n</think>\n\nThree.",
    "kimi": "<think>I count.</think>Three.",
    "gemma": "<|channel>thought\nI count.<channel|>Three.",
    "harmony": (
        "<|channel|>analysis<|message|>I count.<|end|><|start|>assistant<|channel|>final<|message|>Three.<|return|>"
    ),
}

TEMPLATES = {
    "think": "{{ '<think>' if add_generation_prompt }}",
    "hermes": '<tool_call>\\n{"name": "{{ tool_call.name }}", "arguments": <think>',
    "qwen_coder": "<tool_call>\\n<function={{ name }}>\\n<parameter={{ key }}>\\n<think>",
    "glm": "<tool_call>{{ name }}\\n<arg_key>{{ key }}</arg_key>\\n<arg_value><think>",
    "mistral": "[AVAILABLE_TOOLS][TOOL_CALLS][ARGS][THINK]",
    "llama": '<|python_tag|> Respond in the format {"name": function name, "parameters": dictionary of argument name',
    "deepseek": deepseek("<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|></think>"),
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "function_gemma": "<start_function_call>call:{{ name }}{<escape>",
    "gemma": '<|tool_call>call:{{ name }}{<|"|><|channel>thought',
    "harmony": "<|start|>assistant<|channel|>analysis<|message|>",
}
"""What matters of the chat templates of each family."""


@cache
def form(name: str) -> MarkedFormat:
    answer_format = find_format("", name)
    assert isinstance(answer_format, MarkedFormat)
    return answer_format


def parts_of(
    name: str,
    texts: Sequence[str],
    *,
    reasoning: bool = True,
    tools: dict[str, dict[str, Any]] | None = TOOLS,
    in_reasoning: bool = False,
    special: Sequence[str] = (),
) -> list[Part]:
    """Return the parts of an answer, adjacent texts of one kind joined."""
    parser = form(name).parser(reasoning=reasoning, tools=tools, in_reasoning=in_reasoning, special=special)
    parts = [part for text in texts for part in parser.feed(text)]
    parts += parser.finish()
    return list(joined(parts))


def joined(parts: Sequence[Part]) -> Iterator[Part]:
    for kind, group in groupby(parts, type):
        if kind is ToolCall:
            yield from group
        else:
            yield kind("".join(part.text for part in group if not isinstance(part, ToolCall)))


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_found(name: str) -> None:
    (call,) = parts_of(name, [CALLS[name]])
    assert isinstance(call, ToolCall)
    assert ("weather", {"city": "Rome", "days": 2}) == (call.name, json.loads(call.arguments))


@pytest.mark.parametrize("name", CALLS)
def test_without_tools_and_for_other_tools_a_call_is_text(name: str) -> None:
    (content,) = parts_of(name, [CALLS[name]], tools=None)
    assert isinstance(content, Content)
    assert "weather" in content.text
    others = parts_of(name, [CALLS[name]], tools={"other": {}})
    assert [Content] == [type(part) for part in others]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_cut_is_text(name: str) -> None:
    for length in range(1, CALLS[name].index("Rome")):
        parts = parts_of(name, [CALLS[name][:length]])
        assert not any(isinstance(part, ToolCall) for part in parts)


@pytest.mark.parametrize("quote", ['<|"|>', "<escape>"])
def test_values_of_gemma_that_python_wrote_are_json(quote: str) -> None:
    name = "gemma" if "|" in quote else "function_gemma"
    body = CALLS[name].replace("days:2", f"days:None,on:[True,False],word:{quote}None, True{quote}")
    (call,) = parts_of(name, [body])
    assert isinstance(call, ToolCall)
    values = {"city": "Rome", "days": None, "on": [True, False], "word": "None, True"}
    assert values == json.loads(call.arguments)


def test_arguments_within_a_string_of_json_are_read() -> None:
    def call(arguments: str) -> str:
        return f'<tool_call>{{"name": "weather", "arguments": {json.dumps(arguments)}}}</tool_call>'

    assert [ToolCall("weather", ROME)] == parts_of("hermes", [call(ROME)])
    for text in ("Rome", "[1]", '{"city": ', '{"city": "\ud800"}'):
        assert [Content(call(text))] == parts_of("hermes", [call(text)])


def test_marks_around_a_call_that_is_cut_after_reasoning_are_text() -> None:
    begun = CALLS["deepseek"][: CALLS["deepseek"].index("Rome")]
    assert [Reasoning("hm"), Content(begun)] == parts_of("deepseek", ["<think>hm</think>\n" + begun])


def test_a_recipient_of_harmony_in_a_final_answer_is_plain_text() -> None:
    parser = form("harmony").parser(reasoning=True, tools=TOOLS, in_reasoning=False, special=())
    (part,) = parser.feed("<|channel|>final<|message|>Write to=functions.weather there")
    assert Content("Write to=functions.weather there") == part
    assert [] == parser.feed("<|return|>") + parser.finish()


@pytest.mark.parametrize("before", ["", "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"])
def test_a_recipient_of_harmony_before_the_channel_calls(before: str) -> None:
    answer = f"{before} to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ROME}<|call|>"
    assert ToolCall("weather", ROME) == parts_of("harmony", [answer])[-1]


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_is_told_apart(name: str) -> None:
    thought, content = parts_of(name, [REASONING[name]])
    assert (Reasoning, Content) == (type(thought), type(content))
    assert ("I count.", "Three.") == (thought.text.strip(), content.text.strip())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", sorted(set(REASONING) - {"harmony", "gemma"}))
def test_without_reasoning_the_text_keeps_its_marks(name: str) -> None:
    assert [Content(REASONING[name])] == parts_of(name, [REASONING[name]], reasoning=False)


@pytest.mark.parametrize("name", ["hermes", "deepseek"])
def test_reasoning_that_the_prompt_has_opened(name: str) -> None:
    assert form(name).opens_reasoning("… assistant\n<think>\n")
    assert not form(name).opens_reasoning("… assistant\n")
    parts = parts_of(name, ["I count.\n</think>\n\nThree."], in_reasoning=True)
    assert [Reasoning("I count."), Content("Three.")] == parts


@pytest.mark.parametrize("name", sorted((CALLS.keys() & REASONING.keys()) - {"kimi", "harmony"}))
def test_a_call_within_reasoning_is_text_of_the_reasoning(name: str) -> None:
    answer = REASONING[name].replace("I count.", f"I call {CALLS[name]} later.")
    thought, content = parts_of(name, list(answer))
    assert Reasoning(f"I call {CALLS[name]} later.") == thought
    assert Content("Three.") == content
    assert not any(isinstance(part, ToolCall) for part in parts_of(name, [answer], reasoning=False))


def test_a_call_of_kimi_or_of_harmony_ends_reasoning() -> None:
    call = CALLS["kimi"]
    thought, called, content = parts_of("kimi", [f"<think>I call.{call}Done."])
    assert (Reasoning("I call."), Content("Done.")) == (thought, content)
    assert isinstance(called, ToolCall)
    begun = "<|channel|>analysis<|message|>I call.<|start|>assistant to=functions.weather<|message|>"
    assert [Reasoning("I call."), ToolCall("weather", ROME)] == parts_of("harmony", [f"{begun}{ROME}<|call|>"])


def test_a_template_with_reasoning_and_unknown_calls_has_the_format_of_reasoning() -> None:
    for template in ("<think>{{ message.tool_calls }}", "<think><my:tool_call>", "<think>{{ tool_call.name }}"):
        assert form("think") is find_format(template)
    assert not form("think").has_calls


def test_a_parser_does_not_look_at_all_special_tokens_of_the_tokenizer_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"reasoning": True, "tools": TOOLS, "in_reasoning": False}
    special = frozenset(f"<|reserved_{index}|>" for index in range(1000))
    form("hermes").parser(**options, special=special)
    monkeypatch.delattr(marked, "Marks")
    parser = form("hermes").parser(**options, special=special)
    assert [Content("a b")] == parser.feed("a<|reserved_7|> b")


class Counting(dict[str, dict[str, Any]]):
    """Tools that count how often somebody looks at all of them."""

    num_looks = 0

    def __iter__(self) -> Iterator[str]:
        self.num_looks += 1
        return super().__iter__()


def test_marks_of_calls_do_not_lead_through_all_tools_again() -> None:
    tools = Counting({"get_more": {}, **TOOLS, "get": {}})
    kinds = [type(part) for part in parts_of("glm", [*["<tool_call>get_m"] * 50, CALLS["glm"]], tools=tools)]
    assert ([Content, ToolCall], 1) == (kinds, tools.num_looks)
    for name in ("get", "get_more"):
        (call,) = parts_of("glm", list(f"<tool_call>{name}\n</tool_call>"), tools=tools)
        assert ToolCall(name, "{}") == call
    assert [Content("<tool_call>ge</tool_call>")] == parts_of("glm", ["<tool_call>ge</tool_call>"], tools=tools)
    assert [Content("<tool_call>zet")] == parts_of("glm", ["<tool_call>zet"], tools=tools)


@pytest.mark.parametrize("name", CALLS)
def test_calls_come_after_content_and_reasoning(name: str) -> None:
    if name in ("llama", "harmony"):
        return  # a whole answer is the call, or content has a channel of its own
    parts = parts_of(name, ["Let me see. ", CALLS[name]])
    assert [Content, ToolCall] == [type(part) for part in parts]
    assert Content("Let me see.") == parts[0]


def test_special_tokens_are_left_out_of_the_content() -> None:
    assert [Content("one two")] == parts_of("hermes", ["one<|pad|> two<|pad|>"], special=["<|pad|>", "<tool_call>"])


MARKS = sorted(
    {mark for name in CALLS for mark in form(name).marks} | {"Rome", "weather", " ", "\n", "a", '"', "{", "["}
)


@pytest.mark.parametrize("name", sorted({*CALLS, *REASONING}))
@given(data=st.data())
def test_a_division_of_the_text_changes_nothing(name: str, data: st.DataObject) -> None:
    pieces = [*MARKS, CALLS.get(name, "x"), REASONING.get(name, "y"), CALLS.get(name, "x")[:20]]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    divided = [text[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    options: dict[str, Any] = {
        "reasoning": data.draw(st.booleans()),
        "in_reasoning": data.draw(st.booleans()),
        "tools": data.draw(st.sampled_from([TOOLS, None])),
    }
    parts = parts_of(name, [text], **options)
    assert parts == parts_of(name, divided, **options)
    for part in parts:
        assert not isinstance(part, ToolCall) or isinstance(json.loads(part.arguments), dict)


@pytest.mark.parametrize("name", sorted({*CALLS, *REASONING} - {"harmony"}))
@given(data=st.data())
def test_marks_that_make_no_call_are_text_to_the_letter(name: str, data: st.DataObject) -> None:
    pieces = [*sorted(form(name).marks), *MARKS, CALLS.get(name, "x")[:20], CALLS.get(name, "x")[20:]]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    parts = parts_of(name, list(text), reasoning=False, tools={"other": {}})
    assert ([Content(text)] if text else []) == parts


@pytest.mark.parametrize("name", sorted({*CALLS, *REASONING}))
@given(text=st.text(alphabet='ab <>{}[]"\n|', max_size=40))
@example(text="{<<")
def test_nothing_of_a_text_without_marks_is_lost(name: str, text: str) -> None:
    if any(mark in text for mark in form(name).marks if len(mark) > 1):
        return
    assert text == "".join(part.text for part in parts_of(name, list(text)) if not isinstance(part, ToolCall))


@pytest.mark.parametrize("name", sorted({*CALLS, *REASONING}))
def test_plain_text_is_not_held_back(name: str) -> None:
    parser = form(name).parser(reasoning=True, tools=TOOLS, in_reasoning=False, special=())
    assert [Content("plain")] == parser.feed("plain")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_nested_without_end_is_text(name: str) -> None:
    begun = CALLS[name][: CALLS[name].index("Rome")]
    parts = parts_of(name, [begun + "[" * 100_000, "]" * 100_000])
    assert not any(isinstance(part, ToolCall) for part in parts)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_matched_by_its_format_and_no_other(name: str) -> None:
    assert form(name) is find_format(TEMPLATES[name])


def test_a_template_without_marks_has_no_format() -> None:
    assert find_format("{% for message in messages %}{{ message.content }}{% endfor %}") is None
    assert find_format("") is None


def test_a_template_that_two_formats_match_is_for_the_operator() -> None:
    with pytest.raises(StackError, match=r"matches the formats of answers 'harmony' and 'kimi'; choose one"):
        find_format("<|channel|> <|tool_call_begin|>")
    assert form("kimi") is find_format("<|channel|> <|tool_call_begin|>", "kimi")
    with pytest.raises(KVFrameError, match="there is no format of answers named 'nothing'; known: deepseek"):
        find_format("", "nothing")


def test_a_format_of_another_distribution_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "own_format-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-format\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[kvframe.answers]\nown = own_format:OWN\nbroken = own_format:NOTHING\n")
    (tmp_path / "own_format.py").write_text(
        "from kvframe_serve.answers import MarkedFormat\nOWN = MarkedFormat(has=('<<',), opens=('<<',), ends=('>>',))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"own", "broken", "hermes"} <= {entry.name for entry in entry_points(group="kvframe.answers")}
    answer_format = find_format("<< {{ thought }} >>")
    assert answer_format is not None
    parser = answer_format.parser(reasoning=True, tools=None, in_reasoning=False, special=())
    assert [Reasoning("hm"), Content("x")] == [*parser.feed("<<hm>>x"), *parser.finish()]
