"""The check at attach: a packed run through the engine must agree with the model's own plain forward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from kvframe.contract import ModelDescription, ModelError, ModelInput
from kvframe_transformers.names import if_untested

_PROMPT_LENS = (5, 9)
_MAX_LOCAL = 80
"""The longer prompt exceeds windows and chunks up to this size."""


class RunPacked(Protocol):
    """Runs prompts through the attached layers, with as many prompts per batch as the pool holds."""

    def __call__(
        self, prompts: list[list[int]], last_only: bool = False, inputs: Sequence[Mapping[str, ModelInput]] = ()
    ) -> list[torch.Tensor]:
        """Return each prompt's logits ``[len(prompt), vocab_size]``; if ``last_only``, only the last row.

        Args:
            prompts: Token ids.
            last_only: Whether only the last token of each prompt generates.
            inputs: For each prompt, its other inputs (an encoder's), by sequence; empty for none.
        """


def compare_runs(
    description: ModelDescription,
    model: Any,
    modules: Sequence[tuple[str, nn.Module]],
    run_packed: RunPacked,
    run_plain: Callable[[list[int]], torch.Tensor],
    skipped: Sequence[str] = (),
    stored: Collection[torch.dtype] = (),
) -> None:
    """Raise ``ModelError`` if the two runs' logits, or hidden states, differ by more than rounding explains.

    Args:
        description: The model's layers.
        model: The transformers model.
        modules: Its attention modules, by layer name.
        run_packed: Runs prompts through the engine.
        run_plain: Logits ``[len(prompt), vocab_size]`` of one prompt by the model's own attention.
        skipped: The attention layers that compute only the generating tokens of a step.
        stored: The dtypes of stored state, if the engine may round more than the model does.
    """
    result_name = "logits" if description.generates else "hidden states"
    prompts = check_prompts(description, model.config)
    packed_rows = run_packed(prompts)
    # The engine may limit requests to fewer tokens.
    prompts = [prompt[: len(logits)] for prompt, logits in zip(prompts, packed_rows, strict=True)]
    plain = [run_plain(prompt) for prompt in prompts]
    tolerance = tolerance_of(plain[0].dtype, *stored)
    worst = _worst_difference(packed_rows, plain)
    if worst > tolerance:
        where = _first_difference(modules, prompts, run_packed, run_plain, tolerance)
        raise ModelError(
            f"{description.name} ({type(model).__name__}) gives other {result_name} in a packed batch than "
            f"alone{where} (relative difference {worst:.1e}, allowed {tolerance:.1e}): it attends in a way that its "
            f"masks do not show; only a plugin with a cache spec and a model adapter for it can serve it{if_untested()}"
        )
    if not skipped:
        return
    worst = _worst_difference(run_packed(prompts, last_only=True), [logits[-1:] for logits in plain])
    if worst > tolerance:
        raise ModelError(
            f"{description.name} ({type(model).__name__}) gives other {result_name} if its layers from {skipped[0]!r} "
            f"on compute only the last tokens (relative difference {worst:.1e}, allowed {tolerance:.1e}): these layers "
            "do more with the other tokens than their attention shows; turn prefill skipping off for it"
        )


def _worst_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    return max(relative_difference(*pair) for pair in zip(ours, theirs, strict=True))


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Return the relative difference that rounding explains: half of the digits of the least precise dtype.

    It is eight rounding errors of float32 at least, because models of any dtype compute some parts in float32, such as
    norms and routers.
    """
    of_dtypes = max(float(torch.finfo(dtype).eps ** 0.5) for dtype in dtypes if dtype.is_floating_point)
    return max(of_dtypes, 8 * torch.finfo(torch.float32).eps)


def relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``theirs``; infinite if anything is not finite."""
    ours, theirs = ours.double(), theirs.to(ours.device).double()
    if ours.shape != theirs.shape or not ours.isfinite().all():
        return float("inf")
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))


def check_prompts(description: ModelDescription, config: Any) -> list[list[int]]:
    """Return two prompts of random ordinary tokens; the longer one exceeds every small window and chunk."""
    keys = ("window", "lookahead", "chunk")
    local = [value for layer in description.layers for key in keys if (value := layer.options.get(key))]
    crossing = max((size + 5 for size in local if size <= _MAX_LOCAL), default=0)
    longest = description.max_model_len
    if description.bidirectional_prompts:
        crossing, longest = 0, min([longest, *local])  # no longer prompt is served
    # Encoders with a bias by distance: every bucket, in both directions.
    biases = [bias for layer in description.layers if (bias := layer.query.get("relative_bias"))]
    crossing = max([crossing, *(bias["max_distance"] + 5 for bias in biases if bias["bidirectional"])])
    lengths = [min(length, longest) for length in (_PROMPT_LENS[0], max(_PROMPT_LENS[1], crossing))]
    ids = ordinary_ids(config.to_dict(), description.vocab_size or 1)
    generator = torch.Generator().manual_seed(0)
    return [ids[torch.randint(len(ids), (length,), generator=generator)].tolist() for length in lengths]


def ordinary_ids(config: dict[str, Any], vocab_size: int) -> torch.Tensor:
    """Return the ids without a special meaning in the config (an image token, for example, would need an image)."""
    special: set[int] = set()
    for key, value in config.items():
        if value is not None and key.endswith(("token_id", "token_index")):
            special.update(value if isinstance(value, list) else [value])
    ids = [index for index in range(vocab_size) if index not in special]
    return torch.tensor(ids or range(vocab_size))


def _first_difference(
    modules: Sequence[tuple[str, nn.Module]],
    prompts: list[list[int]],
    run_packed: RunPacked,
    run_plain: Callable[[list[int]], torch.Tensor],
    tolerance: float,
) -> str:
    """Return where the runs begin to differ, as the end of a clause; empty for a compiled model."""
    with _outputs(modules) as plain:
        for prompt in prompts:
            run_plain(prompt)
    with _outputs(modules) as packed_outputs:
        for prompt in prompts:  # one by one, because the tokens of several may be computed in any order
            run_packed([prompt])
    for name, _ in modules:
        if not packed_outputs[name] or not plain[name]:
            return ""
        if len({output.shape[1:] for output in (*packed_outputs[name], *plain[name])}) > 1:
            return ""  # its output has no row for each token
        if relative_difference(torch.cat(packed_outputs[name]), torch.cat(plain[name])) > tolerance:
            return f", from layer {name!r} on"
    return ", though every attention layer's output agrees for each prompt alone"


@contextmanager
def _outputs(modules: Sequence[tuple[str, nn.Module]]) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Collect what each module returns, ``[num_tokens, hidden_size]`` per call."""
    outputs: dict[str, list[torch.Tensor]] = {name: [] for name, _ in modules}

    def collect(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            outputs[name].append(first[0].detach())

        return hook

    handles = [module.register_forward_hook(collect(name)) for name, module in modules]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()
