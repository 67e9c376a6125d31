"""The cases in which a cache core could be slow: deep trees, many branches, long shared prompts, far states."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.cache.core_cases import BLOCK_SIZE, Case, Setting, hybrid, sides

AT_MOST_TWICE = 0.5
"""The aim: no worst case takes more than twice the time of vLLM's."""

MAX_ROUNDS = 14
"""Conversations go on in each round, in pools that are made for so many."""


def turns(
    name: str, num_turns: int, *, asked: int = 64, reasoned: int = 128, answered: int = 64, window: int = 1024
) -> Case:
    """Return the case of a conversation whose reasoning is stripped before each next turn."""
    windows = hybrid(1, window)
    kept = asked + answered
    # What the conversation keeps at the end, and two turns: most of the reasoning is evicted.
    num_tokens = (num_turns + MAX_ROUNDS) * kept + 2 * (kept + reasoned)
    setting = Setting(
        windows=windows,
        num_blocks=len(windows) * num_tokens // BLOCK_SIZE + 1,
        max_model_len=(num_turns + MAX_ROUNDS + 2) * kept + reasoned + 2048,
    )
    return Case(
        name=name,
        title=f"Slowest decode step of a conversation after {num_turns} turns with reasoning",
        words=f"One layer of full attention and one with a window of {window:,}. Each turn adds {asked} tokens of "
        f"the user to what is kept, and generates {reasoned} tokens of reasoning and an answer of {answered}. The "
        "reasoning is left out of the next prompt, so that every turn begins a branch. The pool is full: old branches "
        f"are evicted. Timed is the slowest of the {reasoned + answered} decode steps of a turn.",
        work="Turns",
        sizes={"num_turns": num_turns, "asked": asked, "reasoned": reasoned, "answered": answered},
        sides=sides(setting),
        aim=AT_MOST_TWICE,
    )


def chain(name: str, depth: int, *, length: int = 2048, chunk: int = 2048, window: int = 1024) -> Case:
    """Return the case of a chain of blocks with a branch at each of them, which another request evicts."""
    windows = hybrid(1, window)
    setting = Setting(
        windows=windows,
        num_blocks=max(2 * len(windows) * depth, 2 * len(windows) * length // BLOCK_SIZE) + 1,
        max_model_len=max(length, (depth + 2) * BLOCK_SIZE) + 2048,
    )
    return Case(
        name=name,
        title=f"Slowest step among {depth:,} branches of one chain, {chunk:,} tokens a step",
        words=f"One layer of full attention and one with a window of {window:,}. Prompts that part at each of "
        f"{depth:,} blocks of one chain were computed and fill the pool. A request of {length:,} other tokens comes, "
        "is computed, and goes; its blocks take the place of cached ones. Timed is its slowest step.",
        work="Chain",
        sizes={"depth": depth, "length": length, "chunk": chunk},
        sides=sides(setting),
        aim=AT_MOST_TWICE,
    )


def lockstep(name: str, length: int, *, num_requests: int = 8, chunk: int = 256) -> Case:
    """Return the case of identical prompts that are computed at the same time."""
    num_blocks = num_requests * length // BLOCK_SIZE * 9 // 8 + 1
    setting = Setting(num_blocks=num_blocks, max_num_seqs=num_requests + 1, max_model_len=length + 2048)
    return Case(
        name=name,
        title=f"Step of {num_requests} identical prompts of {length:,} tokens",
        words=f"Full attention. {num_requests} requests with the same prompt begin at the same time; each step "
        f"computes {chunk} tokens of each. Timed is the mean step of a whole prefill.",
        work="Lockstep",
        sizes={"num_requests": num_requests, "length": length, "chunk": chunk},
        sides=sides(setting),
        aim=AT_MOST_TWICE,
    )


def far_state(name: str, length: int, *, first: int = 2048, chunk: int = 2048, num_calls: int = 4) -> Case:
    """Return the case of a lookup whose later states are evicted: an early one is left."""
    setting = Setting(num_states=1, num_blocks=length // BLOCK_SIZE * 5 // 4 + 257, max_model_len=2 * length)
    sizes: Mapping[str, int] = {"length": length, "first": first, "chunk": chunk, "num_calls": num_calls}
    return Case(
        name=name,
        title=f"Prefix lookup of {length:,} tokens, the nearest state after {first:,}",
        words="One layer of full attention and one with a recurrent state. Keys and values of the whole prompt are "
        f"cached; of the states, only those of its first {first:,} tokens are left. Looked up as in the other lookups.",
        work="FarState",
        sizes=sizes,
        sides=sides(setting),
        aim=AT_MOST_TWICE,
    )


def worst_cases() -> tuple[Case, ...]:
    """Return what is measured by default."""
    return (
        *(turns(f"turns-{number}", number) for number in (25, 100, 300)),
        chain("chain-500", 500),
        chain("chain-4000", 4000, length=16_384),
        chain("chain-4000-blocks", 4000, length=4096, chunk=BLOCK_SIZE),
        lockstep("lockstep", 131_072),
        far_state("far-state", 131_072),
    )


def tiny_worst_cases() -> tuple[Case, ...]:
    """Return cases to try the script on, not to measure."""
    return (
        turns("tiny-turns", 32, asked=16, reasoned=32, answered=16, window=128),
        chain("tiny-chain", 8, length=64, chunk=32, window=32),
        lockstep("tiny-lockstep", 64, num_requests=2, chunk=16),
        far_state("tiny-far-state", 128, first=64, chunk=32, num_calls=1),
    )
