"""The bodies of all routes. A field is served or refused by name; none is ignored.

The interface is that of https://platform.openai.com/docs/api-reference; ``top_k``, ``ignore_eos``, ``stop_token_ids``,
``skip_special_tokens``, ``add_special_tokens`` and ``chat_template_kwargs`` mean what they mean in vLLM's server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from kvframe_serve.reading.fields import Fields, field, needed, only


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_prompt(value: Any) -> bool:
    if _is_text(value) or _is_ids(value):
        return True
    return isinstance(value, list) and (all(map(_is_text, value)) or all(map(_is_ids, value)))


def _is_stop(value: Any) -> bool:
    return value is None or _is_text(value) or (isinstance(value, list) and all(map(_is_text, value)))


def _is_text_part(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"type", "text"}
        and value["type"] == "text"
        and _is_text(value["text"])
    )


def _is_content(value: Any) -> bool:
    return value is None or _is_text(value) or (isinstance(value, list) and all(map(_is_text_part, value)))


def _is_options(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(isinstance(item, str | bool | int | float | None) for item in value.values())
    )


def _type(accepts: Callable[[Any], bool], expected_type: str, *schemas: dict[str, Any]) -> Any:
    """Return a type for values of several JSON types: pydantic's own unions give an error for each of their types."""

    def check(value: Any) -> Any:
        if not accepts(value):
            raise PydanticCustomError("unexpected", "must be {expected}", {"expected": expected_type})
        return value

    return Annotated[Any, AfterValidator(check), WithJsonSchema({"anyOf": list(schemas)})]


_NULL, _TEXT, _IDS = {"type": "null"}, {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": _TEXT}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _TEXT},
    "required": ["type", "text"],
    "additionalProperties": False,
}

if TYPE_CHECKING:
    Prompts: TypeAlias = Any
    Stop: TypeAlias = Any
    Content: TypeAlias = Any
    Options: TypeAlias = Any
else:
    Prompts = _type(
        _is_prompt,
        "a text, token ids, or a list of texts or of token ids",
        _TEXT,
        _IDS,
        _TEXTS,
        {"type": "array", "items": _IDS},
    )
    Stop = _type(_is_stop, "a text or a list of texts", _NULL, _TEXT, _TEXTS)
    Content = _type(_is_content, "text, or parts of text", _NULL, _TEXT, {"type": "array", "items": _TEXT_PART})
    Options = _type(_is_options, "an object of plain values for the model's chat template", _NULL, {"type": "object"})


class StreamOptions(Fields):
    """The options of a stream."""

    include_usage: bool | None = field("Whether a last event counts the tokens.")
    include_obfuscation: Any = only("Random characters that hide the lengths of events.", False)


class AnswerSchema(Fields):
    """The schema of an answer."""

    name: str = needed("What the answer is called; it changes nothing.")
    description: Any = only("What the answer is for.")
    # A field named `schema` would hide a method of the base class.
    schema_: dict[str, Any] = Field(alias="schema", description="The JSON schema.")
    strict: bool | None = field("Every answer is of the schema, whether it is true or false.")


class ResponseFormat(Fields):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"] = needed("Which form.")
    json_schema: AnswerSchema | None = field("The schema; only with the type `json_schema`.")


class Body(Fields):
    """What the bodies of all routes have in common."""

    model: str | None = field("The name of the served model; without it, the served model.")


class SampledBody(Body):
    """What the bodies of completions and of chats have in common."""

    n: int | None = field("Samples of each prompt.")
    temperature: float | None = field(
        "0 takes the likeliest token; without it, the checkpoint's generation config decides."
    )
    top_p: float | None = field("The fewest likeliest tokens with this probability are sampled from.")
    top_k: int | None = field("So many likeliest tokens are sampled from; 0 or -1 for all.")
    min_p: float | None = field("Tokens with this share of the likeliest one's probability are sampled from.")
    frequency_penalty: float | None = field("Subtracted from a token's logit for each time that it was generated.")
    presence_penalty: float | None = field("Subtracted from a token's logit if it was generated.")
    repetition_penalty: float | None = field(
        "Makes tokens less likely that are in the prompt or the answer already; 1 for none."
    )
    logit_bias: dict[str, float] | None = field("Numbers from -100 to 100 that are added to logits, by token id.")
    min_tokens: int | None = field("The tokens that end the text are not generated before so many others.")
    seed: int | None = field("Makes sampling repeatable; sample i has the seed seed + i.")
    stop: Stop = field("Strings that end the text before them.")
    stop_token_ids: list[int] | None = field("Tokens that end the text, beside the model's own.")
    ignore_eos: bool | None = field("Whether the model's own end tokens do not end the text.")
    skip_special_tokens: bool | None = field("Whether special tokens have no text; true unless given.")
    stream: bool | None = field("Whether the answer comes in parts, as events.")
    stream_options: StreamOptions | None = field("Options of a stream; only with stream.")
    cache_salt: str | None = field("Requests of one key share cached prefixes only if their salts are equal.")
    priority: int | None = field("A smaller number is more urgent, if the server's stack asks for it; 0 unless given.")
    keep_seconds: float | None = field("For how long after the answer the prefix will be needed; 0: not again.")
    session_id: str | None = field("The chat or agent that asks: what only its earlier requests used goes first.")
    include_cached: bool | None = field("Whether usage says where cached tokens came from, and what limited them.")
    user: str | None = field("Who asks; written to the server's log.")
    response_format: ResponseFormat | None = field(
        "Forces the answer into JSON: `json_object`, or `json_schema` with its schema; `text` is any answer."
    )


class CompletionBody(SampledBody):
    """The body of ``POST /v1/completions``."""

    prompt: Prompts = needed("One prompt or a list of prompts: texts, or lists of token ids.")
    max_tokens: int | None = field("The most tokens that are generated; without it, the generation config's, or 16.")
    echo: bool | None = field("Whether the answer begins with the prompt, with logprobs its tokens too.")
    logprobs: int | None = field("Reports each token's log-probability, and those of so many likeliest tokens.")
    add_special_tokens: bool | None = field(
        "Whether a text begins with the tokenizer's special tokens; true unless given."
    )
    cache_boundaries: list[int] | None = field(
        "Numbers of first tokens that other prompts share: states are kept there."
    )
    best_of: Any = only("More samples than are answered.", 1)
    suffix: Any = only("A text after the completion.", "")


class CalledFunction(Fields):
    """A function that a message calls."""

    name: str
    arguments: str


class MessageToolCall(Fields):
    """A tool call in a message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class CacheControl(Fields):
    """A mark of where a prefix ends that other chats share."""

    type: Literal["ephemeral"] = needed("Other prompts begin with the chat up to here.")


class Message(Fields):
    """A message of a chat, in the form in which a client sends it and in which the server answered."""

    role: str = needed("Who says it: the chat template knows the roles.")
    content: Content = field("The text, or parts of text.")
    name: str | None = field("The name of the sender; refused if the chat template ignores it.")
    tool_calls: list[MessageToolCall] | None = field("The tool calls of an assistant's message.")
    tool_call_id: str | None = field("Which tool call this message answers.")
    reasoning_content: str | None = field("The reasoning of an assistant's message, for the chat template.")
    cache_control: CacheControl | None = field(
        "Other chats begin with all messages up to this one: states are kept there; in 4 messages at most."
    )
    refusal: Any = only("A refusal of an assistant's message.", "")
    annotations: Any = only("Annotations of an assistant's message.", [])
    audio: Any = only("Sound.")
    function_call: Any = only("The form of tool calls before tools.")


class ToolFunction(Fields):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Any = only("Whether arguments are forced into the schema.", False)


class Tool(Fields):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class ChatBody(SampledBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: list[Message] = needed("The chat, from its first message to the last.")
    max_tokens: int | None = field(
        "The most tokens that are generated; without it, the generation config's, or the context."
    )
    max_completion_tokens: int | None = field("The newer name of max_tokens.")
    logprobs: bool | None = field("Whether each token's log-probability is reported.")
    top_logprobs: int | None = field("With logprobs: those of so many likeliest tokens too.")
    tools: list[Tool] | None = field("Tools that the model may call, for the chat template; calls are then parsed.")
    tool_choice: Literal["auto", "none"] | None = field("none: the template gets no tools, and no calls are parsed.")
    include_reasoning: bool | None = field("Whether reasoning is parsed, and answered as reasoning_content.")
    reasoning_effort: str | None = field("For the chat template; refused if it ignores it.")
    chat_template_kwargs: Options = field("Further values for the chat template.")
    parallel_tool_calls: Any = only("At most one tool call.", True)
    functions: Any = only("The form of tools before tools.", [])
    function_call: Any = only("The form of tool_choice before tools.", "auto", "none")
    modalities: Any = only("Kinds of output.", ["text"])
    audio: Any = only("Sound.")
    prediction: Any = only("A text that the answer is expected to hold.")
    metadata: Any = only("Values that are stored with the answer.", {})
    store: Any = only("Whether the answer is stored.", False)
    service_tier: Any = only("A class of service.", "auto", "default")
    verbosity: Any = only("How long answers are.")
    web_search_options: Any = only("A search in the web.")
    prompt_cache_key: str | None = field("Written to the log; prefixes are found without it.")
    safety_identifier: str | None = field("Who asks; written to the log.")


class EmbeddingBody(Body):
    """The body of ``POST /v1/embeddings``."""

    input: Prompts = needed("One text or a list of texts, or of lists of token ids.")
    encoding_format: Literal["float", "base64"] | None = field("base64: float32 numbers as base64; float unless given.")
    cache_salt: str | None = field("As for completions.")
    priority: int | None = field("As for completions.")
    keep_seconds: float | None = field("As for completions.")
    session_id: str | None = field("As for completions.")
    user: str | None = field("Who asks; written to the server's log.")
    dimensions: Any = only("A shorter embedding.")


class TokenizeBody(Body):
    """The body of ``POST /tokenize``: a text, or a chat as its template writes it."""

    prompt: str | None = field("The text; or give messages.")
    messages: list[Message] | None = field("The chat; or give a prompt.")
    tools: list[Tool] | None = field("As for chats.")
    chat_template_kwargs: Options = field("As for chats.")
    add_special_tokens: bool | None = field("As for completions; only with a prompt.")


class DetokenizeBody(Body):
    """The body of ``POST /detokenize``."""

    tokens: list[int] = needed("Token ids.")
    skip_special_tokens: bool | None = field("Whether special tokens have no text; false unless given.")
