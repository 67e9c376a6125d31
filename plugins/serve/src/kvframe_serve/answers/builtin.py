"""The built-in formats. Each is declared as an entry point of ``kvframe.answers``, as a plugin's format is.

The marks are those of the chat templates of the checkpoints that a comment names.
"""

from __future__ import annotations

import attrs

from kvframe_serve.answers.calls import NamedBraces, NamedObject, NamedPairs, json_calls
from kvframe_serve.answers.format import ToolCall, Tools
from kvframe_serve.answers.marked import CallMarks, MarkedFormat, Quote

# Qwen 2.5, Qwen 3, Hermes 2 Pro and Hermes 3.
HERMES = MarkedFormat(
    has=("<tool_call>",),
    lacks=("<parameter=", "<arg_key>"),
    opens=("<think>",),
    ends=("</think>",),
    calls=(CallMarks(open="<tool_call>", closes=("</tool_call>",), begins=("{", "["), read=json_calls),),
)

# Qwen3-Coder, Qwen3.5, Nemotron 3. Qwen3-Coder leaves out <tool_call> at times, so that it is layout.
QWEN_CODER = MarkedFormat(
    has=("<parameter=",),
    lacks=("<seed:",),
    opens=("<think>",),
    ends=("</think>",),
    calls=(
        CallMarks(
            open="<function=",
            closes=("</function>",),
            begins=("{name}>",),
            read=NamedPairs(
                head=r"\s*+(?P<name>[^\s>]++)\s*+>",
                pair=r"\s*+<parameter=(?P<key>[^>\n]++)>\n?(?P<value>.*?)\n?</parameter>(?=\s*+(?:<parameter=|\Z))",
            ),
            quotes=(Quote("<parameter=", ("</parameter>",)),),
            needs_close=True,
        ),
    ),
    layout=("<tool_call>", "</tool_call>"),
)

# GLM-4.5 to GLM-4.7.
GLM = MarkedFormat(
    has=("<arg_key>",),
    opens=("<think>",),
    ends=("</think>",),
    calls=(
        CallMarks(
            open="<tool_call>",
            closes=("</tool_call>",),
            begins=("{name}",),
            read=NamedPairs(
                head=r"\s*+(?P<name>[^\s<]++)",
                pair=r"\s*+<arg_key>(?P<key>[^<]*+)</arg_key>\s*+<arg_value>(?P<value>.*?)</arg_value>"
                r"(?=\s*+(?:<arg_key>|\Z))",
            ),
            quotes=(Quote("<arg_value>", ("</arg_value>",)),),
            inner=("<arg_key>", "</arg_key>"),
            needs_close=True,
        ),
    ),
)


def _read_mistral(text: str, tools: Tools) -> list[ToolCall]:
    return json_calls(text, tools) if text.lstrip().startswith("[{") else _MISTRAL_NAMED(text, tools)


_MISTRAL_NAMED = NamedObject(r"\s*+(?P<name>[^\s\[{]++)\s*+(?:\[CALL_ID\][^\[{]*+)?(?:\[ARGS\])?\s*+")

# Mistral 7B v0.3 and Mistral Small 3 (a list of JSON); Devstral 2, Ministral 3 (a name and JSON); Magistral ([THINK]).
MISTRAL = MarkedFormat(
    has=("[TOOL_CALLS]", "[THINK]"),
    opens=("[THINK]",),
    ends=("[/THINK]",),
    is_first=False,
    calls=(CallMarks(open="[TOOL_CALLS]", begins=("[", "{name}"), read=_read_mistral, inner=("[ARGS]", "[CALL_ID]")),),
)


def _read_llama(text: str, tools: Tools) -> list[ToolCall]:
    return json_calls("{" + text, tools)


# Llama 3.1 to 3.3: a whole answer is the JSON of a call, or several with ";" between them.
LLAMA = MarkedFormat(
    has=("<|python_tag|>", '"parameters": dictionary of argument'),
    calls=(
        CallMarks(open="<|python_tag|>", begins=("{",), read=json_calls),
        CallMarks(
            open="{",
            begins=('"name":"{name}"', '"type":"function","name":"{name}"'),
            read=_read_llama,
            is_first=True,
        ),
    ),
    layout=(";",),
)

# DeepSeek V3, R1 and their distilled models (a word "function", and JSON in a block of code); V3.1 (only a name).
DEEPSEEK = MarkedFormat(
    has=("<｜tool▁call▁begin｜>",),
    opens=("<think>",),
    ends=("</think>",),
    calls=(
        CallMarks(
            open="<｜tool▁call▁begin｜>",
            closes=("<｜tool▁call▁end｜>",),
            begins=("function<｜tool▁sep｜>{name}", "{name}"),
            read=NamedObject(
                head=r"\s*+(?:function<｜tool▁sep｜>)?(?P<name>[^\s<{]++)(?:<｜tool▁sep｜>)?\s*+(?:```(?:json)?\s*+)?",
                tail=r"\s*+(?:```\s*+)?",
            ),
            inner=("<｜tool▁sep｜>",),
        ),
    ),
    layout=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)

# Kimi K2 and Kimi K2 Thinking: a call's id is functions.NAME:INDEX.
KIMI = MarkedFormat(
    has=("<|tool_call_begin|>",),
    opens=("<think>",),
    ends=("</think>",),
    calls=(
        CallMarks(
            open="<|tool_call_begin|>",
            closes=("<|tool_call_end|>",),
            begins=("functions.{name}", "{name}"),
            read=NamedObject(
                r"\s*+(?:functions\.)?(?P<name>[^\s<:]++)(?::\d++)?\s*+<\|tool_call_argument_begin\|>\s*+"
            ),
            inner=("<|tool_call_argument_begin|>",),
            ends_reasoning=True,
        ),
    ),
    layout=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)

# FunctionGemma.
FUNCTION_GEMMA = MarkedFormat(
    has=("<start_function_call>",),
    calls=(
        CallMarks(
            open="<start_function_call>",
            closes=("<end_function_call>",),
            begins=("call:{name}",),
            read=NamedBraces(r"\s*+call:\s*+(?P<name>[^\s{]++)", "<escape>"),
            quotes=(Quote("<escape>", ("<escape>",)),),
        ),
    ),
)

# Gemma 4.
GEMMA = MarkedFormat(
    has=("<|tool_call>",),
    opens=("<|channel>thought",),
    ends=("<channel|>",),
    is_first=False,
    calls=(
        CallMarks(
            open="<|tool_call>",
            closes=("<tool_call|>",),
            begins=("call:{name}",),
            read=NamedBraces(r"\s*+call:\s*+(?P<name>[^\s{]++)", '<|"|>'),
            quotes=(Quote('<|"|>', ('<|"|>',)),),
        ),
    ),
)

_HARMONY_CALL = CallMarks(
    open="<|start|>assistant to=functions.",
    closes=("<|call|>", "<|end|>", "<|return|>"),
    begins=("{name}",),
    read=NamedObject(r"(?P<name>[^\s<]++)[^<]*+(?:<\|(?:channel|constrain)\|>[^<]*+)*+<\|message\|>\s*+"),
    inner=("<|channel|>", "<|constrain|>", "<|message|>"),
)

# gpt-oss. A recipient stands before or after the channel, and the prompt ends with <|start|>assistant.
HARMONY = MarkedFormat(
    has=("<|channel|>",),
    opens=("<|channel|>analysis<|message|>",),
    ends=("<|end|>", "<|return|>", "<|start|>assistant", "<|channel|>final<|message|>"),
    is_first=False,
    calls=(
        attrs.evolve(_HARMONY_CALL, ends_reasoning=True),
        attrs.evolve(_HARMONY_CALL, open=" to=functions.", is_first=True),
        attrs.evolve(_HARMONY_CALL, open="<|channel|>commentary to=functions."),
        attrs.evolve(_HARMONY_CALL, open="<|channel|>analysis to=functions."),
    ),
    dropped=(
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|start|>assistant",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
)

_WITH_CALLS = (HERMES, QWEN_CODER, GLM, MISTRAL, LLAMA, DEEPSEEK, KIMI, FUNCTION_GEMMA, GEMMA, HARMONY)

# QwQ, Phi-4-reasoning and others whose templates have no tool calls, or calls that no format here reads.
THINK = MarkedFormat(
    has=("<think>",),
    lacks=tuple(text for form in _WITH_CALLS for text in form.has),
    opens=("<think>",),
    ends=("</think>",),
)
