"""Runs packed batches before the engine serves; the model compares them with its own plain forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import torch

from kvframe import KVCacheManager, StepBatch
from kvframe.contract.errors import PlanError
from kvframe.contract.model import ModelInput
from kvframe_engine.assembly import Assembly
from kvframe_engine.requests.progress import NO_INPUTS, input_sequences
from kvframe_engine.running.model_runner import ModelRunner


def run_packed(
    assembly: Assembly,
    prompts: list[list[int]],
    last_only: bool = False,
    inputs: Sequence[Mapping[str, ModelInput]] = (),
    in_one_step: bool = False,
) -> list[torch.Tensor]:
    """Return the logits ``[len(prompt), vocab_size]`` of each prompt, with as many prompts per batch as the pool holds.

    A batch is computed in three steps, as serving makes them: the longest prompt alone but for its last two
    tokens, its next token beside the other prompts, and the last token of each. Prompts with inputs begin together.

    It has its own request table, so the engine's is not changed.

    Args:
        assembly: The set-up; its model is attached to its layers, and no request is running.
        prompts: Token ids; tokens beyond the length of the longest request are cut off.
        last_only: Let only the last token of each prompt generate, and return its logits ``[1, vocab_size]``.
        inputs: For each prompt, its inputs beside the tokens, by sequence; none unless given.
        in_one_step: Compute all tokens of a batch in one step. So it is always for ``last_only``, and for a model whose
            tokens see later ones.

    Raises:
        PlanError: A prompt does not fit the pool, even alone.
    """
    num_prompts, max_len, local = len(prompts), assembly.max_model_len, assembly.layers.local
    if local.metadata_indices:
        max_len = min(max_len, local.max_tokens)
    manager = KVCacheManager(assembly.plan, max_num_seqs=num_prompts, prefix_caching=False)
    description = assembly.model.description
    is_joint = description.bidirectional_prompts
    # Layers that keep nothing of the past see the tokens of a step only.
    is_whole = in_one_step or last_only or is_joint or bool(local.metadata_indices) or not description.generates
    runner = ModelRunner(
        assembly.model,
        assembly.layers,
        manager.tables,
        assembly.device,
        max_num_seqs=num_prompts,
        max_model_len=max_len,
    )
    waiting = [
        _Prompt(
            token_ids=prompt[:max_len],
            inputs=brought,
            is_joint=is_joint,
        )
        for prompt, brought in zip(prompts, inputs or [NO_INPUTS] * num_prompts, strict=True)
    ]
    logits: list[torch.Tensor] = []
    while waiting:
        num_fitting = _num_fitting(manager, local.fits, waiting)
        if not num_fitting:
            raise PlanError(
                f"{assembly.plan.total_bytes} bytes of cache do not hold the {len(waiting[0].token_ids)} tokens of the "
                "self-check; give more memory, or set self_check = false in the stack's [engine]"
            )
        logits += _run_together(runner, manager, waiting[:num_fitting], is_whole=is_whole, last_only=last_only)
        waiting = waiting[num_fitting:]
    return logits


@attrs.frozen(kw_only=True, eq=False)
class _Prompt:
    """A prompt of the self-check: its tokens, its other inputs, and whether its tokens see each other."""

    token_ids: list[int]
    inputs: Mapping[str, ModelInput]
    is_joint: bool

    def start(self, manager: KVCacheManager, request_id: str) -> None:
        """Add it to the manager's table."""
        brought = input_sequences(self.inputs)
        manager.start(request_id, self.token_ids, inputs=brought)


def _num_fitting(manager: KVCacheManager, fits: Callable[[Sequence[int]], bool], prompts: Sequence[_Prompt]) -> int:
    """Return how many of the first prompts the pool, and the scratch pages of a step, hold at once."""
    lens: list[int] = []
    for index, prompt in enumerate(prompts):
        if not fits([*lens, len(prompt.token_ids)]):
            break
        prompt.start(manager, str(index))
        if not manager.extend(str(index), len(prompt.token_ids)):
            manager.free(str(index))
            break
        lens.append(len(prompt.token_ids))
    for index in range(len(lens)):
        manager.free(str(index))
    return len(lens)


def _run_together(
    runner: ModelRunner, manager: KVCacheManager, prompts: Sequence[_Prompt], *, is_whole: bool, last_only: bool
) -> list[torch.Tensor]:
    """Return the logits of each prompt, computed in the steps that ``run_packed`` names, or in one."""
    rows: list[int] = []
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompts):
        prompt.start(manager, str(index))
        rows.append(manager.row(str(index)))
        runner.set_row(rows[-1], prompt.token_ids, prompt.inputs, len(prompt.token_ids) if prompt.is_joint else 0)
    begins_together = any(prompt.inputs for prompt in prompts)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    for step in _steps(lengths, is_whole=is_whole, begins_together=begins_together):
        new_inputs: dict[str, dict[int, ModelInput]] = {}
        for index, (start, stop) in step.items():
            if not manager.extend(str(index), stop):
                raise PlanError(f"the pool does not hold the {stop} tokens of a prompt, and it held them before")
            for name, value in prompts[index].inputs.items() if start == 0 else ():
                new_inputs.setdefault(name, {})[rows[index]] = value
        lens = [stop - start for start, stop in step.values()]
        batch = StepBatch(
            rows=np.array([rows[index] for index in step]),
            num_computed=np.array([start for start, _ in step.values()]),
            query_lens=np.array(lens),
            generating_indices=np.cumsum(lens) - 1 if last_only else np.arange(sum(lens)),
        )
        packed = runner.forward(batch, new_inputs).split([1] * len(lens) if last_only else lens)
        for (index, (_, stop)), part in zip(step.items(), packed, strict=True):
            parts[index].append(part)
            manager.commit(str(index), prompts[index].token_ids, stop)
    for index in range(len(prompts)):
        manager.free(str(index))
    return [torch.cat(request_parts) for request_parts in parts]


def _steps(lens: Sequence[int], *, is_whole: bool, begins_together: bool) -> list[dict[int, tuple[int, int]]]:
    """Return the tokens of each prompt that each step computes, for prompts of these lengths.

    With ``begins_together``, the first step has a token of each, so that their inputs are encoded in one step.
    """
    longest = max(range(len(lens)), key=lens.__getitem__)
    ends = [[0, min(int(begins_together), length - 1), max(0, length - 1), length] for length in lens]
    ends[longest][1] = max(0, lens[longest] - 2)
    if is_whole:
        ends = [[0, length] for length in lens]
    steps = [
        {
            index: (request_ends[step], request_ends[step + 1])
            for index, request_ends in enumerate(ends)
            if request_ends[step] < request_ends[step + 1]
        }
        for step in range(len(ends[0]) - 1)
    ]
    return [step for step in steps if step]
