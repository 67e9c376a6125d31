"""Trains a hybrid model by policy gradient: an engine samples, and the same model in memory learns.

The reward of a sample is the share of its tokens that are even. Each round samples a batch through the paged cache,
takes a gradient step on the model itself, and tells the engine that the weights have changed.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from kvframe import Engine, SamplingParams, Stack

ROUNDS, SAMPLES, NEW_TOKENS = 20, 32, 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def make_model() -> Any:
    """Return a tiny random hybrid of gated delta layers and attention."""
    torch.manual_seed(0)
    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    return AutoModelForCausalLM.from_config(config)


def main() -> None:
    """Train for a few rounds, and print the reward and how far the two sets of log-probabilities are apart."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    stack = Stack.from_mapping({"cache": {"memory": "8MiB"}})
    with Engine.from_model(model, stack=stack) as engine:
        for number in range(ROUNDS):
            params = SamplingParams(
                max_new_tokens=NEW_TOKENS, temperature=1.0, n=SAMPLES, seed=number * SAMPLES, logprobs=True
            )
            outputs = engine.generate([PROMPT], params)
            tokens = torch.tensor([output.token_ids for output in outputs])
            sampled = torch.tensor([output.logprobs for output in outputs])
            rewards = (tokens % 2 == 0).float().mean(dim=1)

            # The model's own forward, with gradients, on the same tokens.
            batch = torch.cat([torch.tensor([PROMPT]).expand(SAMPLES, -1), tokens], dim=1)
            logits = model(batch).logits[:, len(PROMPT) - 1 : -1]
            logprobs = logits.log_softmax(dim=-1).gather(2, tokens.unsqueeze(2)).squeeze(2)
            difference = (logprobs.detach() - sampled).abs().max()
            print(f"round {number:2}  reward {rewards.mean():.2f}  log-probabilities differ by {difference:.1e}")

            loss = -((rewards - rewards.mean())[:, None] * logprobs).sum(dim=1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            engine.weights_changed()


if __name__ == "__main__":
    main()
