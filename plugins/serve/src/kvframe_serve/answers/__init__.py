"""Reasoning and tool calls in answers: formats, chosen by the checkpoint's chat template.

``find_format(template)`` returns the format that matches a template. ``format.parser(…)`` returns a parser for one
answer: ``feed`` takes its text, and returns the ``Content``, ``Reasoning`` and ``ToolCall`` that are certain. A package
adds a format by an entry point of the group ``kvframe.answers``. It is a ``MarkedFormat``, which is
described by its marks, or a class of its own. Nothing here imports torch or transformers.
"""

from kvframe_serve.answers.calls import CallReader as CallReader
from kvframe_serve.answers.calls import NamedBraces as NamedBraces
from kvframe_serve.answers.calls import NamedObject as NamedObject
from kvframe_serve.answers.calls import NamedPairs as NamedPairs
from kvframe_serve.answers.calls import json_calls as json_calls
from kvframe_serve.answers.format import AnswerFormat as AnswerFormat
from kvframe_serve.answers.format import AnswerParser as AnswerParser
from kvframe_serve.answers.format import Content as Content
from kvframe_serve.answers.format import Part as Part
from kvframe_serve.answers.format import Reasoning as Reasoning
from kvframe_serve.answers.format import ToolCall as ToolCall
from kvframe_serve.answers.format import Tools as Tools
from kvframe_serve.answers.marked import JSON_STRING as JSON_STRING
from kvframe_serve.answers.marked import CallMarks as CallMarks
from kvframe_serve.answers.marked import MarkedFormat as MarkedFormat
from kvframe_serve.answers.marked import Quote as Quote
from kvframe_serve.answers.registry import find_format as find_format
