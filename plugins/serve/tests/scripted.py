"""Checkpoints that answer with a text of the test's choice: real models, in which each token follows another one.

Attention and feed-forward layers add nothing, and embeddings are unit vectors. So the next token depends on the last
one alone, and each piece of the answer is a token of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import torch
from kvframe_transformers.testing import tiny_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

END = "<|end|>"


def save_scripted(
    folder: Path,
    answer: str,
    *,
    template: str | None = None,
    family: str = "llama",
    after: str = ":",
    special: Sequence[str] = (),
    max_model_len: int = 512,
) -> Path:
    """Save a checkpoint that answers every prompt that ends with one character with one text.

    Args:
        folder: Where to.
        answer: The text.
        template: The chat template.
        family: The model's family.
        after: The last character of prompts, a single byte.
        special: The special tokens; they may be in the answer and in the template.
        max_model_len: The model's context.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = (*special, END)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chain = [after, *_pieces(answer, special, {after}), END]
    tokens = [text if text in special else letters.pre_tokenize_str(text)[0][0] for text in chain]
    texts = dict.fromkeys([*alphabet, *(text for text in tokens if text not in special)])
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(texts)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, extra_special_tokens=list(special))
    fast.chat_template = template
    fast.save_pretrained(folder)
    _save_model(folder, family, len(fast), [fast.convert_tokens_to_ids(text) for text in tokens], max_model_len)
    return folder


def _pieces(answer: str, special: Sequence[str], used_texts: set[str]) -> list[str]:
    """Return an answer in different pieces: special tokens, and texts of some characters."""
    if not answer:
        return []
    marks = [text for text in special if answer.startswith(text)]
    until = min((index for text in special if (index := answer.find(text)) > 0), default=len(answer))
    for piece in marks or [answer[:length] for length in (2, 3, 4, 1, 5, 6) if length <= until]:
        if piece not in used_texts:
            with suppress(ValueError):
                return [piece, *_pieces(answer[len(piece) :], special, used_texts | {piece})]
    raise ValueError(f"{answer!r} has no pieces that are all different")


def _save_model(folder: Path, family: str, vocab_size: int, chain: Sequence[int], max_model_len: int) -> None:
    hidden_size = -(-vocab_size // 64) * 64
    model = tiny_model(
        family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        tie_word_embeddings=False,
        max_position_embeddings=max_model_len,
        eos_token_id=chain[-1],
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(vocab_size, hidden_size))
        head = model.get_output_embeddings().weight
        head.zero_()
        for token, following in pairwise(chain):
            head[following, token] = 1.0
        # Any other token, such as one of another prompt, is followed by the end.
        for token in set(range(vocab_size)) - set(chain[:-1]):
            head[chain[-1], token] = 1.0
    model.generation_config = GenerationConfig(eos_token_id=chain[-1])
    model.save_pretrained(folder)
