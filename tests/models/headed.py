"""Tiny checkpoints with prediction heads, and the drafts that transformers' own generator makes with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from kvframe_transformers.checkpoint import quiet
from kvframe_transformers.testing import save_tiny
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

HEADED = ("deepseek_v3", "glm4_moe", "mellum")
"""Families with prediction heads: over latents, over keys and values, and in a window."""


def save_headed(
    path: Path, family: str, num_heads: int = 1, *, agrees: bool = False, num_wrong: int = 0, seed: int = 11
) -> None:
    """Save a tiny random model with prediction heads, whose weights have the names of a published checkpoint.

    Args:
        path: The folder.
        family: One of ``HEADED``.
        num_heads: Prediction heads.
        agrees: Whether the heads guess most tokens right. In such a model, the next token depends on the last one
            almost alone, and a head passes the embedding of its token on.
        num_wrong: If so, how many of them guess most tokens wrong, the last ones: they pass something else on.
        seed: Of the heads' weights.
    """
    model: Any = save_tiny(path, family, num_mtp_layers=num_heads)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        heads: Any = MtpModel(model, num_heads)
        own = {name: value for name, value in heads.state_dict().items() if name.startswith("layers.")}
        for name, value in own.items():
            if value.dim() >= 2:
                # Attention to few keys, which outweighs the rest, so that one wrong key shows.
                scale = 1.0 if "self_attn" in name else 0.16
                value.copy_(scale * torch.randn_like(value))
            else:
                value.add_(0.3 * torch.randn_like(value))
        if agrees:
            for name, value in [*model.state_dict().items(), *own.items()]:
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                    value.mul_(1e-4)
            for name, value in own.items():
                is_wrong = int(name.split(".")[1]) >= num_heads - num_wrong
                if name.endswith("eh_proj.weight"):
                    value.copy_(torch.eye(*value.shape).roll(len(value) if is_wrong else 0, 1))
                elif name.endswith("hnorm.weight") and is_wrong:
                    value.fill_(-1)
                elif name.endswith("enorm.weight"):
                    value.fill_(1)
                elif name.endswith("post_norm.weight"):
                    value.copy_(model.get_decoder().norm.weight)
            with quiet():
                model.save_pretrained(path)
    first, weights = model.config.num_hidden_layers, load_file(path / "model.safetensors")
    for name, value in own.items():
        _, number, rest = name.split(".", 2)
        weights[f"model.layers.{first + int(number)}.{rest.removeprefix('mtp_block.')}"] = value.contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


class Reference:
    """transformers' own candidate generator, over a checkpoint that it loads itself."""

    def __init__(self, path: Path) -> None:
        """Load the model and its heads."""
        with quiet():
            self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            first = self.model.config.num_hidden_layers
            # transformers looks for the numbers of published checkpoints only.
            self.model._keys_to_ignore_on_load_unexpected = [
                rf"\.layers\.{first + head}\." for head in range(self.model.config.num_mtp_layers)
            ]
            self.generator = MTPCandidateGenerator(self.model, self.model.generation_config, {})
            self.generator.mtp_model.eval()

    def drafts_after(self, token_ids: Sequence[int]) -> list[int]:
        """Return the drafts after some tokens. The model has computed all of them except for the last one."""
        generator, ids = self.generator, torch.tensor([list(token_ids)])
        generator.is_main_model_prefill = True
        generator.mtp_cache = MtpCache(config=self.model.config.get_mtp_config())
        generator.mtp_cache.activate_past_recording()
        with torch.inference_mode():
            outputs = self.model(ids[:, :-1], output_hidden_states=-1)
            positions = torch.arange(ids.shape[1])[None]
            candidates, _ = generator.get_candidates(ids, {"position_ids": positions}, outputs, False, 0)
        drafts: list[int] = candidates[0, ids.shape[1] :].tolist()
        return drafts

    def generate(self, prompt: Sequence[int], num_new_tokens: int) -> list[tuple[list[int], list[int]]]:
        """Generate tokens with the heads' drafts; return what the generator drafted, and after which tokens."""
        drafts_by_context: list[tuple[list[int], list[int]]] = []
        with quiet(), noted(drafts_by_context):
            self.model.generate(
                torch.tensor([list(prompt)]), use_mtp=True, do_sample=False, max_new_tokens=num_new_tokens
            )
        return drafts_by_context


@contextmanager
def noted(drafts_by_context: list[tuple[list[int], list[int]]]) -> Iterator[None]:
    """Note what every generator of transformers drafts inside the block, and after which tokens."""
    own = MTPCandidateGenerator.get_candidates

    def noting(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = own(self, input_ids, *args, **kwargs)
        if logits is not None:
            drafts_by_context.append((input_ids[0].tolist(), candidates[0, input_ids.shape[1] :].tolist()))
        return candidates, logits

    MTPCandidateGenerator.get_candidates = noting  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        MTPCandidateGenerator.get_candidates = own  # type: ignore[method-assign]
