"""Write the table of fields in http_server.md from the models that read the bodies of requests.

python docs/server_fields.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kvframe_serve.reading import bodies
from kvframe_serve.reading.fields import Fields, accepted_values

PAGE = Path(__file__).with_name("http_server.md")
TABLES: Mapping[str, type[Fields]] = {
    "`POST /v1/completions`": bodies.CompletionBody,
    "`POST /v1/chat/completions`": bodies.ChatBody,
    "A message of a chat": bodies.Message,
    "`POST /v1/embeddings`": bodies.EmbeddingBody,
    "`POST /tokenize`": bodies.TokenizeBody,
    "`POST /detokenize`": bodies.DetokenizeBody,
}
START, END = "<!-- fields: start -->\n", "<!-- fields: end -->\n"


def write_tables() -> str:
    """Return a table of the fields of each body, and what is refused, as Markdown."""
    return "\n".join(f"### {heading}\n\n{_table(kind)}" for heading, kind in TABLES.items())


def with_tables(page: str) -> str:
    """Return a page with the tables between its two marks."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n{write_tables()}\n{END}{rest.partition(END)[2]}"


def _table(kind: type[Fields]) -> str:
    rows = []
    for name, info in kind.model_fields.items():
        accepted = accepted_values(kind, name)
        if accepted is None:
            served = "required" if info.is_required() else "served"
        else:
            shown = ", ".join(f"`{json.dumps(value)}`" for value in accepted if value is not None)
            served = f"refused, unless it is {shown} or null" if shown else "refused, unless it is null"
        rows.append((f"`{name}`", served, info.description or ""))
    header = ("field", "", "what it says")
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ("---",) * len(header), *rows))


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
