"""Draw request traces from a fixed seed: conversations of one or more turns.

Their lengths are near those of published traces. In the Azure LLM inference trace of 2023 (Splitwise, arXiv
2311.18677), conversations have median prompts of 1,020 tokens and median replies of 129.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

Tokens = array  # of type code "I"
VOCABULARY = 32_000


@attrs.frozen
class Turn:
    """One request: where its prompt and its reply end in the conversation's tokens, and the steps before it comes."""

    prompt_end: int
    end: int
    pause: int


@attrs.frozen
class Conversation:
    """A text that grows turn by turn; its tokens include the replies."""

    token_ids: Tokens[int]
    turns: tuple[Turn, ...]


@attrs.frozen
class Lengths:
    """The distributions of a trace's conversations: medians in tokens, and spreads, the deviation of the logarithm.

    Attributes:
        prompt: The median of the first prompt, without the system prompt.
        more: The median of what each later turn adds.
        turns: The least and the most turns; all numbers between them are equally likely.
        shared: The length of the system prompt at the beginning of a conversation.
        num_shared: The number of different system prompts.
        pause: The mean number of steps between a reply and the next turn.
    """

    prompt: int
    prompt_spread: float
    reply: int
    reply_spread: float
    more: int = 0
    turns: tuple[int, int] = (1, 1)
    shared: int = 0
    num_shared: int = 0
    pause: int = 0


TRACES: Mapping[str, Lengths] = {
    "constant": Lengths(prompt=1_000, prompt_spread=0.0, reply=300, reply_spread=0.0),
    "log-normal": Lengths(prompt=700, prompt_spread=0.9, reply=300, reply_spread=0.8),
    "multi-turn": Lengths(
        prompt=200,
        prompt_spread=0.8,
        reply=300,
        reply_spread=0.6,
        more=100,
        turns=(2, 8),
        shared=1_000,
        num_shared=8,
        pause=100,
    ),
    "long documents": Lengths(
        prompt=8_000, prompt_spread=0.6, reply=600, reply_spread=0.4, more=60, turns=(1, 3), pause=200
    ),
}


def draw(lengths: Lengths, count: int, longest: int, seed: int = 0) -> list[Conversation]:
    """Return ``count`` conversations; equal seeds give equal ones.

    A request has at most ``longest`` tokens. If a typical one has more than half of it, all lengths are made shorter by
    one factor; a turn that is still too long ends its conversation.
    """
    random = np.random.default_rng(seed)
    scale = min(1.0, longest / (2 * typical_tokens(lengths)))
    shared = [draw_tokens(random, round(scale * lengths.shared)) for _ in range(lengths.num_shared)]
    return [_conversation(lengths, random, scale, longest, shared) for _ in range(count)]


def typical_tokens(lengths: Lengths) -> int:
    """Return the tokens of a request in the middle of a conversation, with its reply."""
    middle = (sum(lengths.turns) / 2 - 1) / 2
    return round(lengths.shared + lengths.prompt + lengths.reply + middle * (lengths.more + lengths.reply))


def _conversation(
    lengths: Lengths, random: np.random.Generator, scale: float, longest: int, shared: Sequence[Tokens[int]]
) -> Conversation:
    def length(median: int, spread: float) -> int:
        return max(1, round(scale * median * float(np.exp(spread * random.standard_normal()))))

    text = array("I", shared[int(random.integers(len(shared)))]) if shared else array("I")
    turns: list[Turn] = []
    end = len(text)
    for index in range(int(random.integers(lengths.turns[0], lengths.turns[1] + 1))):
        added = length(lengths.more if index else lengths.prompt, lengths.prompt_spread)
        prompt_end = end + added
        reply = length(lengths.reply, lengths.reply_spread)
        if prompt_end + reply > longest:
            if turns:
                break
            reply = min(reply, longest // 4)
            prompt_end = min(prompt_end, longest - reply)
        end = prompt_end + reply
        turns.append(Turn(prompt_end, end, round(random.exponential(lengths.pause)) if index else 0))
    text.extend(draw_tokens(random, end - len(text)))
    return Conversation(text, tuple(turns))


def draw_tokens(random: np.random.Generator, count: int) -> Tokens[int]:
    """Return random tokens."""
    return array("I", random.integers(VOCABULARY, size=count, dtype=np.uint32).tobytes())
