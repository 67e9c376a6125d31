"""Writes the table of model types, as Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import attrs

from tests.models.census.compare import Verdict

INTRODUCTION = """\
# Which types of models kvframe serves

`python -m tests.models.census` writes this page and `models.json`. For every type in transformers' mappings, it makes a
tiny random model, saves it, and compares what kvframe computes from the checkpoint with what transformers computes, in
float32 on a CPU: the tokens of `generate()` and how likely they are, or the hidden states of an encoder.

- **equal**: the results are equal. Of a model that also takes pictures or sound, this is its text.
- **refused**: kvframe says in one sentence why it does not serve the model.
- **wrong**: the results differ. **fails**: an error, or no end, that names no reason.
- **not tried**: transformers made no such tiny model, or it generated nothing from text.
"""

_WORDS = ("equal", "refused", "wrong", "fails", "not tried")
_LONGEST = 300


@attrs.frozen
class Census:
    """What was compared.

    Attributes:
        day: When, as ``2026-11-28``.
        commit: Of kvframe.
        versions: Of Python, torch and transformers.
        verdicts: By group and type.
    """

    day: str
    commit: str
    versions: str
    verdicts: Mapping[str, Mapping[str, Verdict]]


def render(census: Census) -> str:
    """Return the page."""
    parts = [
        INTRODUCTION,
        f"\nMeasured on {census.day} with {census.versions}, kvframe at {census.commit}.\n\n",
        *_table(
            [
                ["types of transformers", *_WORDS],
                *(
                    [group, *(str(sum(verdict.word == word for verdict in verdicts.values())) for word in _WORDS)]
                    for group, verdicts in census.verdicts.items()
                ),
            ]
        ),
    ]
    for group, verdicts in census.verdicts.items():
        parts.append(f"\n## {group[0].upper()}{group[1:]}\n")
        equal = [name for name, verdict in verdicts.items() if verdict.word == "equal"]
        parts.append(f"\nEqual: {', '.join(equal) or 'none'}.\n")
        noted = [
            [name, verdict.word, _short(verdict.why)] for name, verdict in verdicts.items() if verdict.word != "equal"
        ]
        noted += [
            [name, verdict.word, verdict.why]
            for name, verdict in verdicts.items()
            if verdict.word == "equal" and verdict.why
        ]
        if noted:
            parts += ["\n", *_table([["type", "verdict", "why"], *noted])]
    return "".join(parts)


def as_json(census: Census) -> str:
    """Return the census as text that ``from_json`` reads."""
    return json.dumps(attrs.asdict(census), indent=1) + "\n"


def from_json(text: str) -> Census:
    """Return the census of a text that ``as_json`` made."""
    content = json.loads(text)
    verdicts = {
        group: {name: Verdict(**fields) for name, fields in verdicts.items()}
        for group, verdicts in content["verdicts"].items()
    }
    return Census(**{**content, "verdicts": verdicts})


def _short(why: str) -> str:
    why = why.partition("; only a plugin")[0].partition(", so nothing can be routed")[0]
    return why if len(why) <= _LONGEST else why[:_LONGEST].rpartition(" ")[0] + " …"


def _table(rows: Iterable[list[str]]) -> list[str]:
    first, *rest = ([cell.replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows)
    return [f"| {' | '.join(row)} |\n" for row in (first, ["---"] * len(first), *rest)]
