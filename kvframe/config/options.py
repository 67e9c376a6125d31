"""The options of a stack: one class per table of the file, each key with its check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, TypeVar

import attrs

from kvframe.contract.errors import KVFrameError, PluginError, StackError, listed, nearest_of, shorten, shown
from kvframe.contract.eviction import LRU
from kvframe.contract.foreign import call, safe_reason
from kvframe.contract.sizes import parse_bytes
from kvframe.contract.specs import ITEM_BYTES
from kvframe.loading.checks import (
    DEVICE,
    GRAPH_SIZES,
    MEMORY,
    SIZE_OR_NONE,
    SWITCH,
    TABLE,
    TABLE_OR_NONE,
    TEXT,
    TEXT_OR_NONE,
    WHOLE,
    WHOLE_OR_NONE,
    WHOLES,
    one_of,
)

T = TypeVar("T")


KIND = "kind"
"""The metadata of a field that holds registered names: their kind, a key of ``claims.KINDS``."""

DISK = "disk"
"""The page store of the ``[cache]`` table's key ``disk``."""

ZMQ = "zmq"
"""The event publisher of an address in the ``[cache]`` table's key ``events``."""

MODEL_DTYPES = ("float64", "float32", "float16", "bfloat16")
"""The element types of models."""


def _as_bytes(memory: int | str | None) -> Any:
    # A wrong value is returned as it is: the validator names its key in the error.
    return parse_bytes(memory) if memory not in ("auto", None) and MEMORY.accepts(memory) else memory


def _as_use(value: Any) -> Any:
    return Use(value) if isinstance(value, str) else value


def _as_event_publisher(value: Any) -> Any:
    use = _as_use(value)
    return Use(ZMQ, {"endpoint": use.name}) if isinstance(use, Use) and "://" in use.name else use


def _as_sizes(value: Any) -> Any:
    return tuple(sorted(set(value))) if WHOLES.accepts(value) else value


@attrs.frozen
class Use:
    """A registered name and its options: in a file a string, or a table with ``name`` and the options.

    Attributes:
        name: The registered name.
        options: Their values, by name.
        origin: The file and the key that it was read from, for errors.
    """

    name: str = attrs.field(validator=TEXT)
    options: Mapping[str, Any] = attrs.field(factory=dict, validator=TABLE)
    origin: str = attrs.field(default="the stack", eq=False, repr=False, kw_only=True)

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> Use:
        """Return the name and the options of a table that has ``name``."""
        return cls(table["name"], {key: option for key, option in table.items() if key != "name"})


def make_with_options(option_class: type[T], options: Mapping[str, Any]) -> T:
    """Return an instance of an attrs class.

    Raises:
        ValueError: An option is unknown or missing, or the class refuses a value; the message lists the options.
        PluginError: The class fails in another way.
    """
    fields: list[Any] = [field for field in attrs.fields(option_class) if field.init]  # type: ignore[arg-type]
    names = [field.name for field in fields]
    unknown_names = [name for name in options if name not in names]
    nearest = nearest_of(unknown_names[0], names) if unknown_names else None
    hint = "" if nearest is None else f"; did you mean {nearest!r}?"
    missing_names = [field.name for field in fields if field.default is attrs.NOTHING and field.name not in options]
    try:
        if unknown_names:
            raise ValueError(f"there is no option {listed(map(shown, unknown_names))}")
        if missing_names:
            raise ValueError(f"{', '.join(map(repr, missing_names))} must be given")
        return call(f"{option_class.__name__}()", partial(option_class, **options))
    except (PluginError, ValueError) as failure:
        error = failure.__cause__ if isinstance(failure, PluginError) else failure
        if not isinstance(error, KVFrameError | TypeError | ValueError):
            raise
        raise ValueError(f"{safe_reason(error)}; its options: {', '.join(names) or 'none'}{hint}") from error


def uses_in(table: Any) -> Iterator[tuple[str, str, Use]]:
    """Yield the registered names in a table of options: the key, the kind, and the name with its options."""
    for field in attrs.fields(type(table)):
        value, kind = getattr(table, field.name), field.metadata.get(KIND)
        if kind is not None and isinstance(value, Use):
            yield field.name, kind, value
        elif kind is not None and value is not None:
            yield from ((f"{field.name}[{index}]", kind, use) for index, use in enumerate(value))


AUTO = Use("auto")
"""Leaves the choice of a backend to kvframe."""


@attrs.frozen(kw_only=True)
class CacheOptions:
    """The ``[cache]`` table.

    Attributes:
        memory: Bytes of the cache, such as ``"2GiB"``. ``"auto"``: the bytes that ``max_num_seqs`` requests of
            ``max_model_len`` tokens need; together with copies of pages, at most half of the free memory.
        block_size: Tokens per block.
        hybrid: Whether each layer keeps only the tokens that its type needs; if not, every layer keeps every token.
        dtype: Element type of keys and values; ``"auto"``: the model's.
        format: The registered format in which pages store keys and values, such as one of fewer bits. Without it, or
            with ``"plain"``, they are stored unchanged.
        prefix_caching: Whether requests reuse the blocks of a common prefix.
        eviction: The registered policy that chooses the cached pages that are evicted first; ``"lru"``: the least
            recently used.
        max_kept_percent: The most percent of the cache that the requests of one owner may keep by the hint
            ``keep_seconds``. Of what is beyond, the policy decides as without the hint.
        host_memory: Bytes of CPU memory, such as ``"8GiB"``, for cached blocks that are evicted from the device. Later
            requests find them there, and preempted ones that continue.
        disk: A folder of this machine that keeps cached blocks for later engines, and for others that run at the same
            time: a table with ``path``, and ``size``, the most bytes. It is the page store ``"disk"``.
        stores: Further registered page stores, asked in this order after host memory and disk.
        events: Where events of the cache are published, for routers: the address of the publisher ``"zmq"``, such as
            ``"tcp://127.0.0.1:5557"``, or a registered publisher, a table of ``name`` and its options. Without it,
            nothing is recorded.
        audit: Whether to check after every operation that each page is free, held or cached and counted right, and in
            every step that wrappers name no blocks but the step's: for operators who suspect the cache or a wrapper. It
            needs ``kvframe-testing``. The check takes time in proportion to the pool, and each step waits for the
            device.
        key: The secret of keys that leave the process, in cache events and in files of saved prefixes: 64 hexadecimal
            digits, or a file that holds them. Without it, each engine draws a secret of its own.
    """

    memory: int | Literal["auto"] = attrs.field(default="auto", converter=_as_bytes, validator=MEMORY)
    block_size: int = attrs.field(default=16, validator=WHOLE)
    hybrid: bool = attrs.field(default=True, validator=SWITCH)
    dtype: str = attrs.field(default="auto", validator=one_of("auto", *ITEM_BYTES))
    format: Use | None = attrs.field(default=None, converter=_as_use, metadata={KIND: "format"})
    prefix_caching: bool = attrs.field(default=True, validator=SWITCH)
    eviction: Use = attrs.field(default=Use(LRU.name), converter=_as_use, metadata={KIND: "eviction"})
    max_kept_percent: int = attrs.field(default=50, validator=WHOLE)
    host_memory: int | None = attrs.field(default=None, converter=_as_bytes, validator=SIZE_OR_NONE)
    disk: Mapping[str, Any] | None = attrs.field(default=None, validator=TABLE_OR_NONE)
    stores: tuple[Use, ...] = attrs.field(default=(), metadata={KIND: "page_store"})
    events: Use | None = attrs.field(default=None, converter=_as_event_publisher, metadata={KIND: "event_publisher"})
    audit: bool = attrs.field(default=False, validator=SWITCH)
    key: str | None = attrs.field(default=None, validator=TEXT_OR_NONE, repr=False)


@attrs.frozen(kw_only=True)
class ModelOptions:
    """The ``[model]`` table: how a host runs the model.

    Attributes:
        device: Where the model runs (``"cpu"``, ``"cuda:0"``); ``"auto"``: the first GPU, or the CPU if there is none.
        dtype: The model's element type; ``"auto"``: the checkpoint's, or float32 on a CPU that computes float32 faster.
        prefill_skipping: The wrapper that keeps only a step's generating tokens, for the layers at the model's end that
            keep no cache of their own: they do not compute the rest of a prompt. Without it, every layer computes every
            token.
        drafts: The registered proposer of draft tokens, which a step computes together with a request's last token. The
            tokens stay the same; requests whose drafts are right need fewer steps. Without it, there are no drafts.
        compile: Whether the model around the attention is compiled by ``torch.compile``, when it is attached.
        graphs: The numbers of requests for which whole steps are captured as graphs, when the engine starts, and
            replayed. A step of fewer requests is padded to the next number; a step of more runs without a graph. A
            number above ``max_num_seqs`` stands for that one. ``"auto"`` chooses numbers up to ``max_num_seqs``, and
            runs without graphs if the model, a wrapper or a backend cannot be captured.
        graph_query_lens: How many tokens each request computes in the steps that are captured: one in a decode. Steps
            with the most drafts are captured too.
    """

    device: str = attrs.field(default="auto", validator=DEVICE)
    dtype: str = attrs.field(default="auto", validator=one_of("auto", *MODEL_DTYPES))
    prefill_skipping: Use | None = attrs.field(default=None, converter=_as_use, metadata={KIND: "wrapper"})
    drafts: Use | None = attrs.field(default=None, converter=_as_use, metadata={KIND: "proposer"})
    compile: bool = attrs.field(default=False, validator=SWITCH)
    graphs: Literal["off", "auto"] | tuple[int, ...] = attrs.field(
        default="off", converter=_as_sizes, validator=GRAPH_SIZES
    )
    graph_query_lens: tuple[int, ...] = attrs.field(default=(1,), converter=_as_sizes, validator=WHOLES)


@attrs.frozen(kw_only=True)
class LimitOptions:
    """The ``[limits]`` table: the most that a step and a request may have.

    Attributes:
        max_model_len: The most tokens of a request, prompt and output. Without it, the model's own limit.
        max_num_seqs: The most requests that run at once.
        max_num_batched_tokens: The most tokens that one step computes.
    """

    max_model_len: int | None = attrs.field(default=None, validator=WHOLE_OR_NONE)
    max_num_seqs: int = attrs.field(default=64, validator=WHOLE)
    max_num_batched_tokens: int = attrs.field(default=2048, validator=WHOLE)


@attrs.frozen(kw_only=True)
class EngineOptions:
    """The ``[engine]`` table: what only kvframe's own engine reads.

    Attributes:
        scheduling: The registered policy that orders requests; ``"fcfs"``: those of an owner in the order in which they
            come, and owners share what runs.
        reserve_prompts: Whether a prompt that is computed in parts begins only if the cache has pages for all of it. If
            not, it begins with pages for its first part, and is the first to give its blocks back if pages run out.
        max_samples: The most samples that a request may ask for (``n``).
        max_stop_chars: The most characters of a request's stop strings, all of them together.
        max_step_seconds: How long a step may take if several ranks compute it. If it has not ended by then, all ranks
            end, with a sentence that names the rank which does not wait for another one, and the line it is in.
        self_check: Whether a model's packed run is compared with its own forward before it serves; an error names the
            part that is wrong.
        overlap: Whether the next step is chosen and launched while the device computes the last one: ``"on"``,
            ``"off"``, or ``"auto"``: on a device other than the CPU. Steps with draft tokens never overlap; ``"on"``
            with ``drafts`` is refused.
    """

    scheduling: Use = attrs.field(default=Use("fcfs"), converter=_as_use, metadata={KIND: "scheduling"})
    reserve_prompts: bool = attrs.field(default=True, validator=SWITCH)
    max_samples: int = attrs.field(default=128, validator=WHOLE)
    max_stop_chars: int = attrs.field(default=8192, validator=WHOLE)
    max_step_seconds: int = attrs.field(default=600, validator=WHOLE)
    self_check: bool = attrs.field(default=True, validator=SWITCH)
    overlap: Literal["auto", "on", "off"] = attrs.field(default="auto", validator=one_of("auto", "on", "off"))


@attrs.frozen(kw_only=True)
class Rule:
    """One ``[[rules]]`` table: the layers that it is for, and the choices for them.

    Attributes:
        kind: The rule is for layers whose cache spec has this registered name. Without it, for any.
        layers: The rule is for layers whose name matches this pattern (``"model.layers.*"``). Without it, for any.
        spec: Options that override those of the layers' cache specs. With ``kind``, a registered name, the layers get
            another type, which stores the same keys and values, and the other options are those of this type.
        wrappers: The layers' wrapper chain. Without it, other rules and the layers' cache spec decide.
        backend: The layers' backend; ``"auto"``: kvframe chooses. Without it, other rules decide.
        optional: Whether a model may have no layers that the rule is for, as in a stack for several models. If not,
            such a model is refused.
    """

    kind: str | None = attrs.field(default=None, validator=TEXT_OR_NONE)
    layers: str | None = attrs.field(default=None, validator=TEXT_OR_NONE)
    spec: Mapping[str, Any] = attrs.field(factory=dict, validator=TABLE)
    wrappers: tuple[Use, ...] | None = attrs.field(default=None, metadata={KIND: "wrapper"})
    backend: Use | None = attrs.field(default=None, converter=_as_use, metadata={KIND: "backend"})
    optional: bool = attrs.field(default=False, validator=SWITCH)

    def __attrs_post_init__(self) -> None:
        if self.kind is None and self.layers is None:
            raise StackError('needs kind or layers, to say which layers it is for (layers = "*" is all)')
        if not TEXT.accepts(self.spec.get("kind", "its own")):
            raise StackError(f"spec.kind must be the registered name of a type, not {shown(self.spec['kind'])}")

    def __str__(self) -> str:
        """Return which layers the rule is for, as in the file."""
        keys = (("kind", self.kind), ("layers", self.layers))
        return ", ".join(f'{key} = "{shorten(value)}"' for key, value in keys if value is not None)

    def matches(self, layer_name: str, kind: str) -> bool:
        """Return whether the rule is for a layer."""
        return self.kind in (None, kind) and (self.layers is None or fnmatchcase(layer_name, self.layers))


@attrs.frozen
class ResolvedRule:
    """The combined choices of all rules for one layer.

    Attributes:
        spec: Options that override those of its cache spec.
        wrappers: Its wrapper chain; None for the default of its cache spec.
        backend: Its backend; ``AUTO`` if kvframe chooses.
        kind: The registered name of the type that it gets; None for its own.
    """

    spec: Mapping[str, Any]
    wrappers: tuple[Use, ...] | None
    backend: Use
    kind: str | None = None
