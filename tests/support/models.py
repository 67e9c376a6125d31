"""Tiny checkpoints with tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvframe_transformers.testing import save_tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose tokens are bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _of_bytes(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))


def trained_tokenizer(texts: Sequence[str], vocab_size: int, special_tokens: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer like GPT-2's: every byte is a token, and pieces of the texts are tokens too."""
    tokenizer = _of_bytes(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _of_bytes(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer, **options: Any) -> None:
    """Save a tokenizer beside a model; the options are those of ``PreTrainedTokenizerFast``."""
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)


def save_byte_model(folder: Path, family: str = "llama", **options: Any) -> Any:
    """Save a tiny model whose tokens are bytes, and return it; the options are those of the tokenizer."""
    tokenizer = byte_tokenizer()
    save_tokenizer(folder, tokenizer, **options)
    return save_tiny(folder, family, vocab_size=tokenizer.get_vocab_size())
