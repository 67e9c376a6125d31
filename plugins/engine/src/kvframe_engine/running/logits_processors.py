"""Changes logits before a token is chosen: biases, penalties on repetition, and tokens that may not come.

The order is that of transformers' ``generate()``, with the penalties of the OpenAI interface after it. A request's rows
depend on its own tokens and parameters only, never on what else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from kvframe.contract.errors import PluginError
from kvframe.contract.foreign import call
from kvframe.contract.logits import LogitsProcessor, ProcessedRequest
from kvframe.contract.order import IntArray
from kvframe_engine.requests.params import SamplingParams
from kvframe_engine.requests.processors import Started
from kvframe_engine.requests.request import Request


def process_logits(
    logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """Return the logits from which tokens are chosen, as a copy.

    Args:
        logits: ``[num_rows, vocab_size], device``: for each request, the row of its last known token, then one row for
            each of its drafts.
        requests: The requests.
        drafts: The drafts of each; none unless given.
    """
    # As in generate(), in float32 at least.
    logits, row = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True), 0
    for index, request in enumerate(requests):
        own_drafts: Sequence[int] = () if drafts is None else drafts[index]
        if request.params.changes_logits:
            num_known = len(request.token_ids)
            token_ids = np.concatenate([np.array(request.token_ids, np.int64), np.array(own_drafts, np.int64)])
            for num_drafts in range(1 + len(own_drafts)):
                _process(logits[row + num_drafts], request, token_ids[: num_known + num_drafts])
        row += 1 + len(own_drafts)
    if any(request.processors for request in requests):
        _run_processors(logits, requests, drafts)
    return logits


def _run_processors(logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]] | None) -> None:
    """Let the plugins' processors change the rows of the requests that name them; one that fails ends its requests."""
    asking: dict[LogitsProcessor, list[tuple[Request, Started, ProcessedRequest, range]]] = {}
    row = 0
    for index, request in enumerate(requests):
        own_drafts: Sequence[int] = () if drafts is None else drafts[index]
        rows = range(row, row + 1 + len(own_drafts))
        row = rows.stop
        for started in request.processors:
            processed = ProcessedRequest(request.token_ids, request.num_prompt_tokens, own_drafts, started.state)
            asking.setdefault(started.processor, []).append((request, started, processed, rows))
    # The order of the processors does not depend on the order of the requests.
    for processor, each in sorted(asking.items(), key=lambda item: item[0].name):
        rows_of = torch.tensor([row for *_, rows in each for row in rows], device=logits.device)
        part = logits[rows_of]
        try:
            call(f"{each[0][1].whose}: process()", processor.process, part, [processed for _, _, processed, _ in each])
        except PluginError as error:
            for request, *_ in each:
                request.failure = str(error)
            part.fill_(torch.nan)
        logits[rows_of] = part


def _process(logits: torch.Tensor, request: Request, token_ids: IntArray) -> None:
    """Change the logits of the token that follows ``token_ids``.

    Args:
        logits: ``[vocab_size], device``.
        request: The request.
        token_ids: ``[num_tokens], int64, host``: its prompt and its output.
    """
    params, output, device = request.params, token_ids[request.num_prompt_tokens :], logits.device
    if params.logit_bias:
        biased, biases = np.array([*params.logit_bias]), np.array([*params.logit_bias.values()])
        has_logit = biased < len(logits)
        logits[torch.from_numpy(biased[has_logit]).to(device)] += torch.from_numpy(biases[has_logit]).to(logits)
    if params.repetition_penalty != 1:
        ids = torch.from_numpy(token_ids[token_ids < len(logits)]).to(device)
        values = logits[ids]
        logits[ids] = torch.where(values < 0, values * params.repetition_penalty, values / params.repetition_penalty)
    if (params.frequency_penalty or params.presence_penalty) and len(output):
        generated, counts = np.unique(output, return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[torch.from_numpy(generated).to(device)] -= torch.from_numpy(penalties).to(logits)
    banned = _banned(params, token_ids, len(output))
    if len(output) < params.min_new_tokens:
        banned += request.end_token_ids
    if banned:
        banned_ids = np.array(banned)
        # Some checkpoints name end tokens that their model does not have.
        logits[torch.from_numpy(banned_ids[banned_ids < len(logits)]).to(device)] = -torch.inf


def _banned(params: SamplingParams, token_ids: IntArray, num_generated: int) -> list[int]:
    """Return the ids of the tokens that may not follow ``token_ids``."""
    banned = [*params.suppress_tokens]
    if num_generated == 0:
        banned += params.begin_suppress_tokens
    for *start, last in params.bad_words_ids:
        if len(start) <= len(token_ids) and start == token_ids[len(token_ids) - len(start) :].tolist():
            banned.append(last)
    size = params.no_repeat_ngram_size
    if 0 < size <= len(token_ids):
        ngrams = sliding_window_view(token_ids, size)
        is_repeated = (ngrams[:, :-1] == token_ids[len(token_ids) - size + 1 :]).all(axis=1)
        banned += ngrams[is_repeated, -1].tolist()
    return banned
