"""Draw the pictures of the documentation from kvframe itself: live ranges from cache specs, slabs from a cache manager.

python docs/drawings.py
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvframe import KVCacheManager, group_layers, load_plugins, plan_cache
from kvframe.contract import KVCacheSpec, LayerSpec

FOLDER = Path(__file__).parent
BLOCK_SIZE, NEXT, NUM_TOKENS = 4, 13, 16
INK, PALE, CARD = "var(--ink)", "var(--pale)", "var(--card)"
STYLE = """\
.drawing { --ink: #30363d; --pale: #d0d7de; --card: #ffffff; }
@media (prefers-color-scheme: dark) { .drawing { --ink: #d1d7e0; --pale: #4d555f; --card: #161b22; } }
.drawing text { font: 13px sans-serif; fill: var(--ink); }"""
"""Colours of light and dark pages; the site, into whose pages drawings are put, replaces them by those of its theme."""
SHADE = "#1f6feb33"
COLOURS = ("#1f6feb", "#bf8700")
"""What is drawn for each group; both are told apart by those who see no colours, by their brightness."""

_KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "full attention": ("full_attention", {}),
    "window of 5": ("sliding_window", {"window": 5}),
    "2 sinks, window of 5": ("sliding_window", {"window": 5, "num_sink_tokens": 2}),
    "chunks of 6": ("chunked_local", {"chunk": 6}),
    "recurrent state": ("mamba", {"conv_shapes": ((4, 3),)}),
}

GROUP = 4
CHOSEN = (1, 4, 8, NEXT)
"""The tokens that the query reads in the picture of a choice."""
_ENTRIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "keys and values": ("full_attention", {}),
    "index keys": ("token_entries", {"tensors": {"key": (8,)}}),
    "means of 4 tokens": ("token_entries", {"tensors": {"mean": (8,)}, "tokens_per_entry": GROUP}),
    "unfinished group": ("unfinished_group", {"tensors": {"key": (8,)}, "group": GROUP}),
}
"""What a layer keeps whose queries choose: its main state, and three entries."""


def draw_all() -> dict[str, str]:
    """Return each picture, as SVG, by its file's name."""
    return {"live_ranges.svg": _live_ranges(), "slabs.svg": _slabs(), "flow.svg": _flow(), "choice.svg": _choice()}


def _picture(title: str, width: int, height: int, *parts: str) -> str:
    """Return an SVG on a card of its own, in light or dark colours as its reader wants."""
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="drawing" {size} role="img">'
    card = _box(0, 0, width, height, CARD, "none", radius=8)
    return "\n".join([head, f"<title>{title}</title>", f"<style>\n{STYLE}\n</style>", card, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _box(
    x: float, y: float, width: float, height: float, fill: str, line: str = PALE, dashes: str = "", radius: int = 2
) -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} rx="{radius}" fill="{fill}" stroke="{line}"{dashed}/>'


# --- live ranges ------------------------------------------------------------------------------------------------------


def _spec(kind: str, options: Mapping[str, Any]) -> KVCacheSpec:
    sizes = {} if kind == "mamba" or "tensors" in options else {"num_kv_heads": 1, "head_size": 8}
    made: KVCacheSpec = load_plugins().registry.specs.load(kind)(block_size=BLOCK_SIZE, **sizes, **options)
    return made


def _live_ranges() -> str:
    """Return a row of tokens for each type: those that token 13 needs, and the blocks that are kept for them."""
    left, size, step = 165, 26, 44
    parts = [_text(left + (index + 0.5) * size, 24, str(index), "middle") for index in range(NUM_TOKENS)]
    for row, (label, (kind, options)) in enumerate(_KINDS.items()):
        y = 34 + row * step
        live = {token for start, stop in _spec(kind, options).live_ranges(NEXT) for token in range(start, stop)}
        kept = {token // BLOCK_SIZE for token in (*live, NEXT)}
        parts.append(_text(12, y + 18, label))
        for token in range(NUM_TOKENS):
            fill = COLOURS[0] if token in live else CARD
            line = INK if token == NEXT else PALE
            parts.append(_box(left + token * size + 2, y + 2, size - 4, size - 4, fill, line))
        for block in sorted(kept):
            x = left + block * BLOCK_SIZE * size
            parts.append(_box(x, y, BLOCK_SIZE * size - 1, size, "none", INK, "4 3"))
    bottom = 34 + len(_KINDS) * step
    parts.append(_text(12, bottom + 8, f"Filled: the live range at {NEXT}. Dashed: the blocks that are resident."))
    return _picture("Live ranges of attention types", left + NUM_TOKENS * size + 12, bottom + 24, *parts)


# --- a choice ---------------------------------------------------------------------------------------------------------


def _choice() -> str:
    """Return the entries that a layer keeps when the token after ``NEXT`` comes, and what the query at NEXT reads."""
    left, size, step, length = 165, 26, 36, NEXT + 1
    parts = [_text(left + (index + 0.5) * size, 24, str(index), "middle") for index in range(length)]
    for row, (label, (kind, options)) in enumerate(_ENTRIES.items()):
        y, spec = 34 + row * step, _spec(kind, options)
        parts.append(_text(12, y + 18, label))
        for start, stop in spec.live_ranges(length):
            width = spec.tokens_per_entry
            for first in range(start, stop - width + 1, width):
                parts.append(_box(left + first * size + 2, y + 2, width * size - 4, size - 4, COLOURS[row > 0]))
    y = 34 + len(_ENTRIES) * step
    parts.append(_text(12, y + 18, f"the query at {NEXT}"))
    for token in range(length):
        fill = COLOURS[0] if token in CHOSEN else CARD
        parts.append(_box(left + token * size + 2, y + 2, size - 4, size - 4, fill, INK if token == NEXT else PALE))
    numbers = ", ".join(map(str, CHOSEN[:-1]))
    parts.append(_text(12, y + 50, f"Above: what is kept. Below: what the query chose, {numbers} and {NEXT}."))
    return _picture("What is kept, and what one query reads", left + length * size + 12, y + 66, *parts)


# --- slabs ------------------------------------------------------------------------------------------------------------


def _slabs() -> str:
    """Return the slabs of a pool that two groups share, while one request runs."""
    layers = [
        *(LayerSpec(name=f"full.{each}", spec=_spec("full_attention", {})) for each in range(1)),
        *(LayerSpec(name=f"window.{each}", spec=_spec("sliding_window", {"window": 9})) for each in range(3)),
    ]
    plan = plan_cache(group_layers(layers), memory_bytes=8 << 10, max_model_len=64, max_num_batched_tokens=16)
    manager, tokens = KVCacheManager(plan, max_num_seqs=2, prefix_caching=False), array("I", range(30))
    manager.start("request", tokens)
    for done in range(10, len(tokens) + 1, 10):  # a prompt is computed in parts
        assert manager.extend("request", done)
        manager.commit("request", tokens[:done], done)
    held = {
        block_id * plan.block_id_bytes - plan.null_bytes: group
        for group, blocks in enumerate(manager.block_ids("request"))
        for block_id in blocks
        if block_id
    }
    owner = {offset // plan.slab_bytes: group for offset, group in held.items()}
    left, width, height = 100, 430, 26
    parts = []
    scale = width / plan.slab_bytes
    for slab in range(plan.num_slabs):
        y, group = 14 + slab * (height + 8), owner.get(slab)
        parts.append(_text(12, y + 18, f"slab {slab}"))
        parts.append(_box(left, y, width, height, CARD, INK))
        if group is None:
            parts.append(_text(left + 8, y + 18, "free: any group may take it"))
            continue
        page_bytes = plan.groups[group].page_bytes
        for offset in range(0, plan.slab_bytes - page_bytes + 1, page_bytes):
            fill = COLOURS[group] if slab * plan.slab_bytes + offset in held else CARD
            parts.append(_box(left + offset * scale + 3, y + 3, page_bytes * scale - 6, height - 6, fill))
    bottom = 14 + plan.num_slabs * (height + 8)
    for index, each in enumerate(plan.groups):
        parts.append(_box(left, bottom + 4 + index * 22, 14, 14, COLOURS[index]))
        spec = each.spec.kind.replace("_", " ")
        parts.append(
            _text(left + 22, bottom + 16 + index * 22, f"a page of group {index}, {spec}: {each.page_bytes} bytes")
        )
    return _picture("Slabs of a pool", left + width + 12, bottom + 56, *parts)


# --- the flow ---------------------------------------------------------------------------------------------------------

_STAGES = (
    ("model config", "layer specs", "groups", "cache plan"),
    ("block pool", "block tables", "batch metadata"),
    ("wrappers", "backend metadata", "backend", "output"),
)
_BY_PLUGINS = {"layer specs", "wrappers", "backend metadata", "backend"}


def _flow() -> str:
    """Return the stages, from a model's config to attention's output; plugins make those with a filled border."""
    width, height, gap = 128, 38, 26
    parts = [
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{INK}"/></marker></defs>'
    ]
    names = ("once for a model", "as requests come and go", "in each step")
    for row, (stages, when) in enumerate(zip(_STAGES, names, strict=True)):
        y = 34 + row * (height + 62)
        parts.append(_text(12 + (width / 2 + 12) * (row > 0), y - 10, when))
        for column, stage in enumerate(stages):
            x = 12 + column * (width + gap)
            fill = SHADE if stage in _BY_PLUGINS else CARD
            parts += [_box(x, y, width, height, fill, INK), _text(x + width / 2, y + 24, stage, "middle")]
            if column:
                parts.append(_arrow(x - gap, y + height / 2, x - 2, y + height / 2))
        if row:
            last = 12 + (len(_STAGES[row - 1]) - 1) * (width + gap) + width / 2
            above = y - 62
            parts.append(
                f'<path d="M{last:g} {above:g} V{above + 22:g} H{12 + width / 2:g} V{y - 2:g}" fill="none" '
                f'stroke="{INK}" marker-end="url(#end)"/>'
            )
    bottom = 34 + len(_STAGES) * (height + 62) - 44
    parts.append(_text(12, bottom, "Shaded: plugins say it or make it."))
    return _picture("The flow from a model to attention", 12 + 4 * (width + gap), bottom + 14, *parts)


def _arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="{INK}" marker-end="url(#end)"/>'


if __name__ == "__main__":
    for name, picture in draw_all().items():
        (FOLDER / name).write_text(picture, encoding="utf-8")
