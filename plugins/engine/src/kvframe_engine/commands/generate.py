"""``kvframe generate``: run prompts through a model on disk."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe import find_model
from kvframe.cli.options import (
    TEXT_TYPE,
    block_size_option,
    dtype_option,
    json_option,
    max_model_len_option,
    memory_option,
    read_stack,
    stack_option,
)
from kvframe.cli.render import print_json, progress
from kvframe_engine.commands import prefixes
from kvframe_engine.commands.interrupts import ctrl_c_is_noted
from kvframe_engine.commands.options import (
    REFUSED_EXIT_CODE,
    UseType,
    cache_salt_option,
    complete_registered,
    device_option,
    drafts_option,
    log_lines,
    read_salts,
)
from kvframe_engine.commands.prompts import PromptCommand, prompt_options, read_given_prompts
from kvframe_engine.commands.sampling import sampling_options
from kvframe_engine.commands.streaming import is_textless, print_stream

if TYPE_CHECKING:
    from kvframe import Use
    from kvframe_engine.engine import Engine
    from kvframe_engine.prefixes.saved import SavedPrefix
    from kvframe_engine.requests.output import RequestOutput
    from kvframe_engine.requests.params import SamplingParams

_MOST_FLUSH_SECONDS = 60.0
"""How long a command waits at its end for page stores."""

_FLUSH_SECONDS = 0.25
"""How long Ctrl-C waits meanwhile."""


@click.command(cls=PromptCommand, short_help="Generate text with a model on disk.")
@click.argument("model", type=click.Path(path_type=Path))
@prompt_options
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Default: as the checkpoint's generation config says, or 64.",
)
@sampling_options
@click.option(
    "--n", "num_samples", type=click.IntRange(min=1), default=1, metavar="N", help="Draw N samples of each prompt."
)
@click.option("--stop", type=TEXT_TYPE, multiple=True, metavar="TEXT", help="End before this text; repeat for several.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end tokens.")
@click.option(
    "--processor",
    "processors",
    type=UseType(),
    multiple=True,
    metavar="NAME",
    shell_complete=complete_registered("logits_processor"),
    help="Let a logits processor change what is likely; repeat for several. One with options: a JSON object, such as "
    '\'{"name": "guided", "regex": "[0-9]+"}\'.',
)
@click.option("--prompt-logprobs", is_flag=True, help="Report how likely each prompt token is; needs --json.")
@drafts_option
@click.option(
    "--prefill-skipping",
    metavar="NAME",
    shell_complete=complete_registered("wrapper"),
    help="Skip prompt tokens in layers at the model's end that keep no cache, by this wrapper, such as decode_only.",
)
@cache_salt_option
@prefixes.load_option
@prefixes.save_option
@stack_option
@memory_option
@block_size_option
@max_model_len_option
@device_option
@dtype_option
@json_option
def generate(
    model: Path,
    texts: tuple[str, ...],
    prompts_file: Path | None,
    token_ids_file: Path | None,
    max_new_tokens: int | None,
    sampling: dict[str, Any],
    num_samples: int,
    stop: tuple[str, ...],
    ignore_eos: bool,
    processors: tuple[Use | str, ...],
    prompt_logprobs: bool,
    drafts: Use | str | None,
    prefill_skipping: str | None,
    cache_salts: tuple[str, ...],
    loaded_file: Path | None,
    saved_file: Path | None,
    stack_file: Path | None,
    memory: str | None,
    block_size: int | None,
    max_model_len: int | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Generate text with MODEL, a model's folder or the id of a repository (Qwen/Qwen3-0.6B).

    Prompts come from one of --prompt, --prompts and --prompt-token-ids. On a terminal, the text of a single prompt is
    shown as it comes. Ctrl-C ends the generation, and what was generated is printed; several prompts end after the
    running step, or at once at the second Ctrl-C. A prompt that cannot be served is refused alone: the others finish,
    and the exit code is 1.
    """
    if prompt_logprobs and not as_json:
        raise click.UsageError("--prompt-logprobs reports in JSON only; add --json")
    prompts = read_given_prompts(texts, prompts_file, token_ids_file)
    salts = read_salts(cache_salts, len(prompts))
    if loaded_file is not None:
        prefixes.check_loaded_file(loaded_file)
    if saved_file is not None:
        prefixes.check_saved_file(saved_file)
    model = find_model(model, weights=True)
    if max_new_tokens is not None:
        sampling["max_new_tokens"] = max_new_tokens
    stack = read_stack(
        stack_file,
        cache={"memory": memory, "block_size": block_size},
        model={"device": device, "dtype": dtype, "drafts": drafts, "prefill_skipping": prefill_skipping},
        limits={"max_model_len": max_model_len},
    )

    from kvframe_engine.engine import Engine

    with log_lines():
        new_engine = Engine.from_pretrained(model, stack=stack)
    prefixes_of_files: dict[str, Sequence[SavedPrefix]] = {}
    # One prompt on a terminal is shown as it is generated. Several would mix, so that they have a progress bar.
    streams = len(prompts) == num_samples == 1 and not as_json and sys.stdout.isatty()
    bar: AbstractContextManager[Any] = nullcontext() if streams else progress("generating", len(prompts))
    with new_engine as engine, bar as show:
        params = engine.default_params(
            stop=stop,
            ignore_eos=ignore_eos,
            n=num_samples,
            processors=dict(map(_processor, processors)),
            prompt_logprobs=prompt_logprobs,
            **sampling,
        )
        if loaded_file is not None:
            prefixes_of_files["loaded_prefixes"] = engine.load_prefixes(loaded_file)
        if saved_file is not None:
            prefixes_of_files["saved_prefixes"] = engine.save_prefixes(saved_file, prompts, cache_salt=salts)
        if not as_json:
            for file, name in ((loaded_file, "loaded_prefixes"), (saved_file, "saved_prefixes")):
                if file is not None:
                    prefixes.show(name.partition("_")[0], file, prefixes_of_files[name])
        start_time = time.perf_counter()
        interrupted = False
        try:
            if streams:
                outputs = [_stream(engine, prompts[0], params, salts[0])]
            else:
                with ctrl_c_is_noted() as ctrl_c:
                    outputs = engine.generate(
                        prompts,
                        params,
                        cache_salt=salts,
                        on_progress=lambda num_done: show(num_done) or not ctrl_c.is_set(),
                    )
                interrupted = ctrl_c.is_set()
            interrupted = interrupted or not _flush(engine)
        finally:
            stats = {**engine.stats().to_dict(), "seconds": time.perf_counter() - start_time}
            if streams:
                _print_stats(stats)
    prompts = _prompt_of_each(prompts, outputs)
    if as_json:
        files = {name: list(map(prefixes.to_dict, saved)) for name, saved in prefixes_of_files.items()}
        print_json({"outputs": list(map(_to_dict, prompts, outputs)), "stats": stats, **files}, indent=None)
    elif not streams:
        _print(prompts, outputs, stats)
    if interrupted:
        raise KeyboardInterrupt
    if any(output.error is not None for output in outputs):
        click.get_current_context().exit(REFUSED_EXIT_CODE)


def _flush(engine: Engine) -> bool:
    """Wait until page stores have what was computed, so that the next command finds it; return False after Ctrl-C."""
    deadline = time.monotonic() + _MOST_FLUSH_SECONDS
    try:
        while not engine.flush_page_stores(_FLUSH_SECONDS):
            if time.monotonic() > deadline:
                click.echo(f"kvframe: page stores took not all pages in {_MOST_FLUSH_SECONDS:.0f} seconds", err=True)
                break
    except KeyboardInterrupt:
        return False  # what was generated is printed first
    return True


def _processor(use: Use | str) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the options of a logits processor of the command line."""
    return (use, {}) if isinstance(use, str) else (use.name, use.options)


def _prompt_of_each(prompts: Sequence[str | list[int]], outputs: Sequence[RequestOutput]) -> Sequence[str | list[int]]:
    """Return the prompt of each output: a prompt has one output per sample, and its first sample is number 0."""
    prompt_numbers = itertools.accumulate(output.sample == 0 for output in outputs)
    return [prompts[number - 1] for number in prompt_numbers]


def _to_dict(prompt: str | list[int], output: RequestOutput) -> dict[str, Any]:
    return {
        # The tokens that are continued; a model with an encoder has an input too. None for a text that was refused.
        "prompt_token_ids": list(output.prompt_token_ids),
        "sample": output.sample,
        "token_ids": list(output.token_ids),
        "text": output.text,
        "finish_reason": output.finish_reason,
        "error": output.error,
        "cached": None if output.cached is None else attrs.asdict(output.cached),
        "prompt_logprobs": None if output.prompt_logprobs is None else list(map(_finite, output.prompt_logprobs)),
    }


def _finite(value: float | None) -> float | None:
    # JSON has no infinities and no NaN.
    return value if value is not None and math.isfinite(value) else None


def _stream(engine: Engine, prompt: str | list[int], params: SamplingParams, salt: str) -> RequestOutput:
    """Print a prompt and its continuation token by token, and return the last output.

    Ctrl-C ends the request and the line. What was generated stays on the terminal.
    """
    stream = engine.stream(prompt, params, cache_salt=salt)
    click.echo(click.style(str(prompt), bold=True))
    try:
        output = print_stream(engine, stream)
    finally:
        stream.close()
        click.echo()
    if output.error is not None:
        click.echo(f"{output.finish_reason}: {output.error}")
    elif not output.text and not is_textless(engine):
        click.echo(" ".join(map(str, output.token_ids)))
    click.echo()
    return output


def _print(prompts: Sequence[str | list[int]], outputs: Sequence[RequestOutput], stats: dict[str, Any]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        click.echo(click.style(str(prompt), bold=True))
        if output.error is not None:
            click.echo(f"{output.finish_reason}: {output.error}")
        else:
            # A model without a tokenizer returns ids only.
            click.echo(output.text or " ".join(map(str, output.token_ids)))
        click.echo()
    _print_stats(stats)


def _print_stats(stats: dict[str, Any]) -> None:
    if sys.stderr.isatty():
        click.echo(
            f"{stats['generated_tokens']} tokens in {stats['seconds']:.2f} s; "
            f"{stats['prefix_hit_rate']:.0%} of the prompts' tokens were cached",
            err=True,
        )
        if stats["restored_tokens"]:
            blocks = ", ".join(
                f"{count:,} blocks of {name}" for name, count in stats["restored_blocks"].items() if count
            )
            click.echo(f"{stats['restored_tokens']:,} tokens were brought back: {blocks}", err=True)
        for index, lookups in enumerate(stats["lookups"]):
            if lookups["times_limiting"]:
                click.echo(
                    f"group {index} ({lookups['kind']}) made the cached prefix shorter {lookups['times_limiting']} "
                    f"times: alone it had {lookups['found_tokens']:,} of {lookups['asked_tokens']:,} tokens",
                    err=True,
                )
