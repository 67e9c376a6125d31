"""Train the demo's model: a small Gemma 3 with sliding-window and full layers, and a tokenizer of its own.

Nothing is downloaded. The text is the source of a few standard library modules; mixed into it is a copy task whose
segments are longer than the sliding window, so that a right answer needs tokens that only the full layers still hold.
The segments all have one length, so a copy attends at a fixed distance, which a model this small learns quickly.
A model on disk is reused for as long as its recipe, this file and the text stay the same.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast

MODULES = ("textwrap", "heapq", "shlex", "fnmatch", "bisect")
EOS, COPY, REPEAT = "<eos>", "<copy>", "<repeat>"
WINDOW = 32
SEGMENT_TOKENS = 40
TASK_TOKENS = 2 * SEGMENT_TOKENS + 3
VOCAB_SIZE = 512
MAX_MODEL_LEN = 512
DEFAULT_PATH = Path(__file__).resolve().parents[2] / ".cache" / "demo-model"
_KEY_FILE = "recipe.sha256"


@attrs.frozen(kw_only=True)
class Phase:
    """A part of the training with rows of one length.

    Attributes:
        share: The share of all steps.
        rows: Sequences in a batch.
        tokens: The tokens of a row.
    """

    share: float
    rows: int
    tokens: int


@attrs.frozen(kw_only=True)
class Recipe:
    """What to train, and how. Two runs of one recipe, on one machine, give the same model.

    Attributes:
        modules: The modules whose sources are the training text.
        num_layers: The number of layers; every second one is full, the others have a window of ``WINDOW`` tokens.
        hidden_size: The size of a hidden state.
        intermediate_size: The width of the feed-forward layers.
        steps: Optimizer steps.
        learning_rate: The largest learning rate.
        seed: The seed of the weights and the batches.
        phases: Short rows first, because they teach much in little time; then long rows, for the positions that are
            served.
    """

    modules: tuple[str, ...] = MODULES
    num_layers: int = 4
    hidden_size: int = 128
    intermediate_size: int = 384
    steps: int = 400
    learning_rate: float = 4e-3
    seed: int = 7
    phases: tuple[Phase, ...] = (
        Phase(share=0.75, rows=16, tokens=168),
        Phase(share=0.25, rows=6, tokens=416),
    )


DEFAULT_RECIPE = Recipe()


@attrs.frozen(kw_only=True)
class Trained:
    """A model on disk, with its loss and accuracy in the last steps of its training.

    Attributes:
        path: The folder, in the usual checkpoint layout.
        cached: Whether it was there already.
        loss: Mean over the text's tokens, in nats.
        copied: Share of copied tokens that are right, greedily.
    """

    path: Path
    cached: bool
    loss: float
    copied: float


def read_text(recipe: Recipe) -> str:
    """Return the training text: the sources of the recipe's modules, in that order."""
    return "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in recipe.modules)


def make_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of ``VOCAB_SIZE`` tokens on ``text``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS, COPY, REPEAT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=EOS)


def make_config(recipe: Recipe) -> Gemma3TextConfig:
    """Return the architecture: every second layer full, the others with a window of ``WINDOW`` tokens."""
    return Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * (recipe.num_layers // 2),
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )


def copy_prompt(segment: torch.Tensor) -> torch.Tensor:
    """Return ``<copy> segment <repeat>``: the model has to repeat the segment, then ``<eos>``."""
    return torch.cat([torch.tensor([1]), segment, torch.tensor([2])])


def copy_task(generator: torch.Generator) -> torch.Tensor:
    """Return a random segment's ``copy_prompt``, the segment again, and ``<eos>``: ``TASK_TOKENS`` ids."""
    segment = torch.randint(3, VOCAB_SIZE, (SEGMENT_TOKENS,), generator=generator)
    return torch.cat([copy_prompt(segment), segment, torch.tensor([0])])


def make_batch(text_ids: torch.Tensor, phase: Phase, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``input_ids, labels``, both ``[rows, tokens], int64``: text, and copy tasks with text around them.

    A segment itself is random, so it counts in no loss: label -100.
    """

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    inputs = []
    labels = []
    for row in range(phase.rows):
        start = draw(0, len(text_ids) - phase.tokens)
        ids = text_ids[start : start + phase.tokens].clone()
        label = ids.clone()
        if row % 2:
            tasks = [copy_task(generator) for _ in range(phase.tokens // TASK_TOKENS)]
            start = draw(0, phase.tokens - len(tasks) * TASK_TOKENS + 1)
            for task in tasks:
                stop = start + TASK_TOKENS
                ids[start:stop] = label[start:stop] = task
                label[start : stop - SEGMENT_TOKENS - 1] = -100
                start = stop
        inputs.append(ids)
        labels.append(label)
    return torch.stack(inputs), torch.stack(labels)


def _plan_phases(recipe: Recipe) -> Iterator[Phase]:
    """Yield the phase of each step."""
    ends = [round(sum(p.share for p in recipe.phases[: i + 1]) * recipe.steps) for i in range(len(recipe.phases))]
    for step in range(recipe.steps):
        yield next(phase for phase, end in zip(recipe.phases, ends, strict=True) if step < end)


def train(text_ids: torch.Tensor, recipe: Recipe, progress: Progress) -> tuple[Gemma3ForCausalLM, float]:
    """Train a model; returns it with its loss on the text, a mean over the last tenth of the steps."""
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = Gemma3ForCausalLM(make_config(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = max(1, recipe.steps // 20)
    text_losses: list[float] = []
    task = progress.add_task("training", total=recipe.steps, loss=math.nan)
    model.train()
    for step, phase in enumerate(_plan_phases(recipe)):
        inputs, labels = make_batch(text_ids, phase, generator)
        logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decay = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (step + 1) / warmup) * max(0.05, decay)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            text_losses.append(
                float(torch.nn.functional.cross_entropy(logits[::2].flatten(0, 1), labels[::2, 1:].flatten()))
            )
        progress.update(task, advance=1, loss=text_losses[-1])
    tail = text_losses[-max(1, recipe.steps // 10) :]
    return model.eval(), sum(tail) / len(tail)


@torch.no_grad()
def measure_copying(model: Gemma3ForCausalLM, text_ids: torch.Tensor, recipe: Recipe, rows: int = 16) -> float:
    """Return the share of copied tokens whose most likely prediction is right, on segments not seen in training."""
    phase = attrs.evolve(recipe.phases[-1], rows=2 * rows)
    inputs, labels = make_batch(text_ids, phase, torch.Generator().manual_seed(recipe.seed + 1))
    inputs, labels = inputs[1::2], labels[1::2, 1:]
    # The copied tokens lie between <repeat> and the next <eos>.
    copy_mask = ((inputs == 2).cumsum(1) > (inputs == 0).cumsum(1))[:, :-1]
    predicted = model(input_ids=inputs, use_cache=False).logits[:, :-1].argmax(-1)
    return float((predicted == labels)[copy_mask].float().mean())


def _content_key(recipe: Recipe, text: str) -> str:
    """Return a hash of everything that the model depends on and that a person may change."""
    parts = (repr(recipe), Path(__file__).read_text(encoding="utf-8"), text)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _read_cached(path: Path, key: str) -> Trained | None:
    """Return the trained model in ``path`` if its recorded key is ``key``."""
    record = path / _KEY_FILE
    if not record.is_file():
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise FileExistsError(f"{path} exists already and is not the demo's model; name another folder")
        return None
    trained_key, loss, copied = record.read_text(encoding="utf-8").split()
    return Trained(path=path, cached=True, loss=float(loss), copied=float(copied)) if trained_key == key else None


def _publish(model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerFast, trained: Trained, key: str) -> None:
    """Write to a temporary folder, then rename it to ``trained.path``, so that this folder is always complete."""
    path = trained.path
    partial = Path(tempfile.mkdtemp(prefix=path.name + ".", dir=path.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        (partial / _KEY_FILE).write_text(f"{key} {trained.loss!r} {trained.copied!r}\n", encoding="utf-8")
        shutil.rmtree(path, ignore_errors=True)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def make_model(
    path: Path = DEFAULT_PATH, recipe: Recipe = DEFAULT_RECIPE, *, console: Console | None = None
) -> Trained:
    """Return the demo's model in ``path``; train it if it is missing or was made from another recipe.

    Args:
        path: The folder to make.
        recipe: What to train; a few steps are enough for tests.
        console: Shows a progress bar, if it is a terminal.
    """
    text = read_text(recipe)
    key = _content_key(recipe, text)
    path.parent.mkdir(parents=True, exist_ok=True)
    # If two processes need the model at once, the second one waits for the first.
    with FileLock(path.with_name(path.name + ".lock")):
        cached = _read_cached(path, key)
        if cached is not None:
            return cached
        tokenizer = make_tokenizer(text)
        text_ids = torch.tensor(tokenizer.encode(text))
        console = console or Console(stderr=True)
        status = TextColumn("{task.completed}/{task.total}, loss {task.fields[loss]:.2f}")
        columns = (TextColumn("{task.description}"), BarColumn(), status, TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            model, loss = train(text_ids, recipe, progress)
        trained = Trained(path=path, cached=False, loss=loss, copied=measure_copying(model, text_ids, recipe))
        _publish(model, tokenizer, trained, key)
        return trained


if __name__ == "__main__":
    result = make_model()
    state = "already there" if result.cached else "trained"
    print(f"{result.path}: {state}, loss {result.loss:.3f}, copies beyond the window {result.copied:.1%}")
