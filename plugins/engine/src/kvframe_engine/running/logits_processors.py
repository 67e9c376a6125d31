"""Changes logits before a token is chosen: biases, penalties on repetition, and tokens that may not come.

The order is that of transformers' ``generate()``, with the penalties of the OpenAI interface after it. A request's rows
depend on its own tokens and parameters only, never on what else is in the batch.

If the device is ahead of the host, the host knows a request's tokens up to the last one, for which it has a name. The
host then finds what the earlier tokens decide, and the device reads the last one and does the rest. The host waits for
nothing. No state is kept on the device: each step copies the tokens of requests with penalties there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import sliding_window_view

from kvframe.contract.errors import PluginError
from kvframe.contract.foreign import call
from kvframe.contract.order import IntArray
from kvframe_engine.contract.logits import LogitsProcessor, ProcessedRequest
from kvframe_engine.requests.params import SamplingParams
from kvframe_engine.requests.processors import Started
from kvframe_engine.requests.request import Request
from kvframe_engine.running.next_tokens import to_device

ReadTokens = Callable[[torch.Tensor], torch.Tensor]
"""Returns token ids, ``int64, device``, with the tokens themselves in place of their names."""

TokenIds = npt.NDArray[np.int32]
"""Token ids and names of tokens in as few bytes as hold them, because they go to the device in each step."""

_ANY = np.iinfo(np.int32).min
"""In place of the token after which another one is banned: it is banned after any."""


@attrs.frozen(eq=False)
class ChangedRow:
    """A row of logits that its request's parameters change.

    Attributes:
        index: Its index among the rows.
        request: The request.
        token_ids: ``[num_tokens], int32, host``: the request's tokens and drafts before the one that is to be chosen.
            The last may be a name.
    """

    index: int
    request: Request
    token_ids: TokenIds

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.request.params

    @property
    def output(self) -> TokenIds:
        """The tokens after the prompt."""
        return self.token_ids[self.request.num_prompt_tokens :]


def changed_rows(
    requests: Sequence[Request], drafts: Sequence[Sequence[int]] = (), names: Sequence[Sequence[int]] = ()
) -> list[ChangedRow]:
    """Return the rows of logits that parameters change, with the tokens that are known now.

    Args:
        requests: The requests. Each has a row for its last token, then one row for each of its drafts.
        drafts: The drafts of each; none unless given.
        names: The names of the tokens of each that the host does not know; it knows all unless given.
    """
    changed: list[ChangedRow] = []
    row = 0
    for index, request in enumerate(requests):
        own_drafts = drafts[index] if drafts else ()
        if request.params.changes_logits:
            later = [*(names[index] if names else ()), *own_drafts]
            token_ids = np.empty(len(request.token_ids) + len(later), np.int32)
            token_ids[: len(request.token_ids)] = request.token_ids
            token_ids[len(request.token_ids) :] = later
            num_known = len(token_ids) - len(own_drafts)
            changed += [
                ChangedRow(row + num_drafts, request, token_ids[: num_known + num_drafts])
                for num_drafts in range(1 + len(own_drafts))
            ]
        row += 1 + len(own_drafts)
    return changed


def process_logits(
    logits: torch.Tensor, changed: Sequence[ChangedRow], read_tokens: ReadTokens = lambda token_ids: token_ids
) -> torch.Tensor:
    """Return the logits from which tokens are chosen, as a copy.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        changed: The rows that parameters change.
        read_tokens: Reads the tokens that the host has names for.
    """
    # As in generate(), in float32 at least.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
    for change in (_add_biases, _penalise_repetition, _penalise_frequency, _ban):
        change(logits, changed, read_tokens)
    return logits


def run_processors(logits: torch.Tensor, requests: Sequence[Request], drafts: Sequence[Sequence[int]] = ()) -> None:
    """Let the plugins' processors change the rows of the requests that name them; one that fails ends its requests.

    Args:
        logits: ``[num_rows, vocab_size], device``, a copy.
        requests: As for ``changed_rows``.
        drafts: As for ``changed_rows``.
    """
    asking: dict[LogitsProcessor, list[tuple[Request, Started, ProcessedRequest, range]]] = {}
    row = 0
    for index, request in enumerate(requests):
        own_drafts = drafts[index] if drafts else ()
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


def _indices(
    logits: torch.Tensor, rows: Sequence[ChangedRow], token_ids: Sequence[TokenIds], read_tokens: ReadTokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each token's logit among all logits, and that of its row in ``rows``: both int64, device.

    Args:
        logits: ``[num_rows, vocab_size], device``.
        rows: The rows.
        token_ids: For each row, ``[n], int32, host``: the tokens, which have logits.
        read_tokens: Reads the tokens that the host has names for.
    """
    device, width = logits.device, logits.shape[1]
    starts = to_device(torch.tensor([row.index * width for row in rows]), device)
    counts = to_device(torch.tensor([len(own_ids) for own_ids in token_ids]), device)
    owners = torch.repeat_interleave(counts, output_size=sum(map(len, token_ids)))
    ids_there = to_device(torch.from_numpy(np.concatenate(token_ids)), device).long()
    return starts.index_select(0, owners) + read_tokens(ids_there), owners


def _numbers(values: Sequence[object], logits: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return numbers of rows on the device of logits."""
    return to_device(torch.tensor(values, dtype=dtype), logits.device)


def _add_biases(logits: torch.Tensor, changed: Sequence[ChangedRow], read_tokens: ReadTokens) -> None:
    rows = [row for row in changed if row.params.logit_bias]
    if rows:
        ids = [np.fromiter(row.params.logit_bias, np.int64) for row in rows]
        biases = np.concatenate([np.fromiter(row.params.logit_bias.values(), np.float64) for row in rows])
        biases = biases[np.concatenate(ids) < logits.shape[1]]
        indices, _ = _indices(logits, rows, [_with_logits(own_ids, logits) for own_ids in ids], read_tokens)
        logits.view(-1).index_add_(0, indices, to_device(torch.from_numpy(biases).to(logits.dtype), logits.device))


def _penalise_repetition(logits: torch.Tensor, changed: Sequence[ChangedRow], read_tokens: ReadTokens) -> None:
    rows = [row for row in changed if row.params.repetition_penalty != 1]
    if rows:
        token_ids = [_with_logits(row.token_ids, logits) for row in rows]
        indices, owners = _indices(logits, rows, token_ids, read_tokens)
        penalties = _numbers([row.params.repetition_penalty for row in rows], logits, logits.dtype)[owners]
        values = logits.view(-1)[indices]
        # A token that came several times gets the same value each time.
        logits.view(-1)[indices] = torch.where(values < 0, values * penalties, values / penalties)


def _with_logits(token_ids: npt.NDArray[np.integer[Any]], logits: torch.Tensor) -> TokenIds:
    """Return those of tokens that have a logit: some checkpoints name tokens that their model does not have."""
    if token_ids.max(initial=0) >= logits.shape[1]:
        token_ids = token_ids[token_ids < logits.shape[1]]
    return token_ids.astype(np.int32, copy=False)


def _penalise_frequency(logits: torch.Tensor, changed: Sequence[ChangedRow], read_tokens: ReadTokens) -> None:
    rows = [row for row in changed if row.params.frequency_penalty or row.params.presence_penalty]
    if any(len(row.output) for row in rows):
        indices, owners = _indices(logits, rows, [row.output for row in rows], read_tokens)
        ordered = indices.sort().values
        counts = torch.searchsorted(ordered, indices, right=True) - torch.searchsorted(ordered, indices)
        per_time, once = _numbers(
            [(row.params.frequency_penalty, row.params.presence_penalty) for row in rows], logits
        )[owners].unbind(1)
        logits.view(-1)[indices] = logits.view(-1)[indices] - (per_time * counts + once).to(logits.dtype)


def _ban(logits: torch.Tensor, changed: Sequence[ChangedRow], read_tokens: ReadTokens) -> None:
    bans = [_bans_of(row, logits) for row in changed]
    if any(len(banned) for banned, _ in bans):
        indices, owners = _indices(logits, changed, [banned for banned, _ in bans], read_tokens)
        after = to_device(torch.from_numpy(np.concatenate([after for _, after in bans])), logits.device)
        last = read_tokens(_numbers([row.token_ids[-1] for row in changed], logits, torch.int64))[owners]
        limits = torch.where((after == last) | (after == _ANY), -torch.inf, torch.inf).to(logits.dtype)
        logits.view(-1).scatter_reduce_(0, indices, limits, "amin")


def _bans_of(row: ChangedRow, logits: torch.Tensor) -> tuple[TokenIds, IntArray]:
    """Return the tokens that may not follow a row's tokens, as far as those before the last one decide.

    Returns:
        The banned tokens, and for each the last token after which it is banned.
    """
    params, token_ids, num_generated = row.params, row.token_ids, len(row.output)
    banned = [*params.suppress_tokens]
    if num_generated == 0:
        banned += params.begin_suppress_tokens
    if num_generated < params.min_new_tokens:
        banned += row.request.end_token_ids
    after = [_ANY] * len(banned)
    num_earlier = len(token_ids) - 1
    for *start, last in params.bad_words_ids:
        num_start = len(start)
        if num_start <= len(token_ids) and start[:-1] == token_ids[len(token_ids) - num_start : num_earlier].tolist():
            banned.append(last)
            after.append(start[-1] if start else _ANY)
    all_banned, all_after = np.array(banned, np.int64), np.array(after, np.int64)
    size = params.no_repeat_ngram_size
    if 0 < size <= len(token_ids):
        ngrams = sliding_window_view(token_ids, size)
        ngrams = ngrams[(ngrams[:, :-2] == token_ids[len(token_ids) - size + 1 : num_earlier]).all(axis=1)]
        all_banned = np.concatenate([all_banned, ngrams[:, -1]])
        all_after = np.concatenate([all_after, ngrams[:, -2] if size > 1 else np.full(len(ngrams), _ANY)])
    has_logit = all_banned < logits.shape[1]
    return all_banned[has_logit].astype(np.int32), all_after[has_logit]
