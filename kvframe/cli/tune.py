"""``kvframe tune``: measure the backends of a model's layers, so that ``"auto"`` takes the fastest one."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvframe.cli.completion import complete_registered
from kvframe.cli.options import device_option, dtype_option, json_option, load_checked_plugins, read_stack, stack_option
from kvframe.cli.render import compact_names, print_json, print_reasons, print_table
from kvframe.config.hub import find_model
from kvframe.contract.errors import FileError, KVFrameError, StackError

if TYPE_CHECKING:
    from kvframe.config.stack import Stack
    from kvframe.contract.specs import LayerSpec
    from kvframe.loading.registry import Registry
    from kvframe.selection.choice import Choice
    from kvframe.selection.times import MeasuredTime

MIN_CONTEXT = 8


@click.command(short_help='Measure the backends on this device, for backend = "auto".')
@click.argument("model", type=click.Path(path_type=Path), metavar="MODEL_OR_CONFIG")
@stack_option
@device_option
@dtype_option
@click.option(
    "--context",
    type=click.IntRange(min=MIN_CONTEXT),
    default=2048,
    show_default=True,
    metavar="N",
    help="Tokens of the longest request that is measured, at most the model's limit.",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_registered("backend"),
    help="Measure only this backend; repeat for several. Default: all.",
)
@click.option(
    "--table",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The table to which the times are added. Default: the one that the stack names, or the user's own.",
)
@json_option
def tune(
    model: Path,
    stack_file: Path | None,
    device: str | None,
    dtype: str | None,
    context: int,
    backends: tuple[str, ...],
    table: Path | None,
    as_json: bool,
) -> None:
    """Measure every backend that can serve a model's layers, once for each shape of layer, and write a table of times.

    MODEL_OR_CONFIG is what `kvframe plan` takes; no weights are read. Three kinds of steps are measured: 16 decodes,
    one prompt, and 8 decodes with a part of a prompt. Backends are compared by the geometric mean of these times,
    weighted 0.6, 0.2 and 0.2. `kvframe explain` shows the times that decide.
    """
    import torch

    from kvframe.engine.running.device import check_device
    from kvframe.planning.groups import make_layer_specs
    from kvframe.planning.machine import with_device, with_dtype
    from kvframe.planning.recognise import describe_model
    from kvframe.selection.select import select_backends
    from kvframe.selection.times import TimesTable, default_path, time_key

    stack = with_device(read_stack(stack_file, engine={"device": device, "dtype": dtype}))
    check_device(stack)
    registry = load_checked_plugins(stack).registry
    model = find_model(model, weights=False)
    stack = with_dtype(stack, model, registry)
    description = describe_model(model, registry)
    layers = make_layer_specs(description, registry, stack, stack.engine.dtype)
    named = stack.engine.measured_times
    path = table or (Path(named) if isinstance(named, str) else default_path())
    _check_table(path)
    context = max(MIN_CONTEXT, min(context, description.max_model_len))
    unmeasured = attrs.evolve(stack, engine=attrs.evolve(stack.engine, measured_times=False))
    choices = select_backends(layers, unmeasured, registry, torch.device(stack.engine.device).type)
    wanted = {registry.backends.get(name).id for name in backends or registry.backends.names()}
    results = [*_measure_all(layers, choices, unmeasured, registry, context, wanted)]
    times = {
        time_key(stack.engine.device, result.shape, result.backend): result.time for result in results if result.time
    }
    if times:
        _check_table(path)  # again, because measuring took long
        known = TimesTable.read(path) if path.exists() and path.stat().st_size > 0 else TimesTable()
        try:
            known.with_times(times, {result.shape: result.note for result in results}).write(path)
        except FileError as error:
            raise StackError(f"{path}: the table of times {error}") from error
    if as_json:
        print_json({"table": str(path), "context": context, "results": [_in_json(result) for result in results]})
        return
    print_results(description.name, results, path)


@attrs.frozen(kw_only=True)
class Result:
    """The result of measuring one backend for one shape of layer.

    Attributes:
        layers: The layers of this shape.
        shape: The shape, as the table has it.
        note: The shape, in words.
        backend: The backend.
        time: The measured time; None if it could not be measured.
        problem: Why it could not be measured; empty if it was.
    """

    layers: tuple[str, ...]
    shape: str
    note: str
    backend: str
    time: MeasuredTime | None
    problem: str = ""


def _check_table(path: Path) -> None:
    """Raise for a file that is not a table of times, or that cannot be written, before the measurements start."""
    from kvframe.selection.times import check_table_place

    try:
        check_table_place(path)
    except FileError as error:
        raise StackError(f"{path}: the table of times {error}") from error


def _measure_all(
    layers: Sequence[LayerSpec],
    choices: Sequence[Choice],
    stack: Stack,
    registry: Registry,
    context: int,
    wanted: Collection[str],
) -> Iterator[Result]:
    """Measure each shape of layer that ``backend = "auto"`` has a choice for."""
    import torch

    from kvframe.engine.tuning import able_backends, check_measurable, is_measured, measure
    from kvframe.selection.times import layer_shape

    device = torch.device(stack.engine.device)
    by_name = {layer.name: layer for layer in layers}
    alike: dict[str, list[Choice]] = {}
    for choice in choices:
        if is_measured(choice):
            alike.setdefault(layer_shape(choice.wrapped, choice.wrappers), []).append(choice)
    for members in alike.values():
        check_measurable(by_name[members[0].layer], device, context)
    for shape, members in alike.items():
        layer = by_name[members[0].layer]
        names = tuple(choice.layer for choice in members)
        for backend in (name for name in able_backends(members[0]) if name in wanted):
            click.echo(f"{compact_names(names)}: {backend}", err=True)
            found, problem = None, ""
            try:
                found = measure(layer, backend, stack, registry, device, context, time.perf_counter, len(members))
            except (KVFrameError, RuntimeError, MemoryError) as error:  # torch raises RuntimeError for many causes
                problem = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            yield Result(layers=names, shape=shape, note=_note(layer), backend=backend, time=found, problem=problem)


def _note(layer: LayerSpec) -> str:
    return f"{layer.spec}, {layer.query}"


def _in_json(result: Result) -> dict[str, Any]:
    seconds = None if result.time is None else dict(result.time.seconds)
    return {
        "layers": list(result.layers),
        "shape": result.shape,
        "backend": result.backend,
        "seconds": seconds,
        "score": None if result.time is None else result.time.score,
        "problem": result.problem,
    }


def print_results(model: str, results: Sequence[Result], path: Path) -> None:
    """Print a table of the measured times, and then why other backends could not be measured.

    Args:
        model: The model's name.
        results: One for each shape of layer and each backend.
        path: The table to which the times were added.
    """
    from kvframe.selection.times import WEIGHTS

    if not results:
        click.echo(f"{model}: nothing to measure: no layer can choose between two of the backends that were asked for")
        return

    def in_ms(result: Result) -> list[str]:
        if result.time is None:
            return ["-"] * (1 + len(WEIGHTS))
        return [f"{1e3 * seconds:.3f}" for seconds in (*result.time.seconds.values(), result.time.score)]

    rows = [(f"{len(each.layers)}: {compact_names(each.layers)}", each.backend, *in_ms(each)) for each in results]
    print_table(
        f"{model}: milliseconds of a step, per layer",
        ("layers", "backend", *(f"{kind} ({weight})" for kind, weight in WEIGHTS.items()), "weighted mean"),
        rows,
    )
    problems: dict[str, list[str]] = {}
    for each in results:
        if each.time is None:
            problems.setdefault(each.problem, []).append(f"{each.backend} on {compact_names(each.layers)}")
    if problems:
        print_reasons("Not measured", problems)
    click.echo(f"written to {path}" if any(result.time for result in results) else "nothing was measured")
