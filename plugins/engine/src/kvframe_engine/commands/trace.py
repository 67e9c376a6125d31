"""``kvframe trace``: run prompts, and draw what each step computed as a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvframe import find_model
from kvframe.cli.options import (
    dtype_option,
    max_model_len_option,
    memory_option,
    read_stack,
    stack_option,
)
from kvframe.cli.pages import write_page
from kvframe.cli.render import print_facts, progress
from kvframe_engine.commands.interrupts import ctrl_c_is_noted
from kvframe_engine.commands.options import device_option, drafts_option, log_lines
from kvframe_engine.commands.prompts import PromptCommand, prompt_options, read_given_prompts

if TYPE_CHECKING:
    from kvframe import Use
    from kvframe_engine.engine import Engine
    from kvframe_engine.step_trace import StepTrace


@click.command(cls=PromptCommand, short_help="Run prompts, and draw each step on a page.")
@click.argument("model", type=click.Path(path_type=Path))
@prompt_options
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True, metavar="N")
@drafts_option
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="The page to write; it needs no network.",
)
@stack_option
@memory_option
@max_model_len_option
@device_option
@dtype_option
def trace(
    model: Path,
    texts: tuple[str, ...],
    prompts_file: Path | None,
    token_ids_file: Path | None,
    max_new_tokens: int,
    drafts: Use | str | None,
    html: Path,
    stack_file: Path | None,
    memory: str | None,
    max_model_len: int | None,
    device: str | None,
    dtype: str | None,
) -> None:
    """Run prompts through MODEL, a model's folder or the id of a repository, and write a page with the run's timeline.

    It shows for each request when it waited, computed its prompt, generated and was preempted, what was found of its
    prompt, and the blocks that each cache group holds. Ctrl-C ends the run after its step; the page shows it until
    there.
    """
    prompts = read_given_prompts(texts, prompts_file, token_ids_file)
    model = find_model(model, weights=True)
    stack = read_stack(
        stack_file,
        cache={"memory": memory},
        model={"drafts": drafts, "device": device, "dtype": dtype},
        limits={"max_model_len": max_model_len},
    )

    from kvframe_engine.engine import Engine
    from kvframe_engine.requests.request import SamplingParams

    with log_lines():
        new_engine = Engine.from_pretrained(model, stack=stack)
    with new_engine as engine, progress("generating", len(prompts)) as show:
        recorded = engine.start_trace()
        with ctrl_c_is_noted() as ctrl_c:
            engine.generate(
                prompts,
                SamplingParams(max_new_tokens=max_new_tokens),
                on_progress=lambda num_done: show(num_done) or not ctrl_c.is_set(),
            )
        page = page_of_trace(engine, recorded)
    write_page(html, "trace.html", page, package="kvframe_engine.commands")
    events = [event.what for event in recorded.events]
    print_facts(
        "Recorded",
        [
            ("steps", f"{len(recorded.steps):,}"),
            ("requests", f"{len(page['requests']):,}"),
            ("preemptions", f"{events.count('preempted'):,}"),
            ("page", str(html)),
        ],
    )
    if ctrl_c.is_set():
        raise KeyboardInterrupt


def page_of_trace(engine: Engine, recorded: StepTrace[Any]) -> dict[str, Any]:
    """Return the data of a recording's page.

    Args:
        engine: The engine that was recorded.
        recorded: The recording.
    """
    order = dict.fromkeys(event.request_id for event in recorded.events)
    return {
        "model": engine.model.description.name,
        "requests": list(order),
        "groups": [{"kind": group.spec.kind, "page_bytes": group.page_bytes} for group in engine.plan.groups],
        "cache_bytes": engine.plan.total_bytes,
        **recorded.to_dict(),
    }
