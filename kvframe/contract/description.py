"""Model descriptions: the layers and sizes of a model as plain values, read without weights or torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from kvframe.contract.errors import ModelError


@attrs.frozen(kw_only=True)
class LayerDescription:
    """One layer as found in a model: what kind of cache spec it needs, with which options.

    The core turns it into a ``LayerSpec`` by looking ``kind`` up in the registry, so an adapter imports no spec type.

    Attributes:
        name: Unique in the model, the module's path.
        kind: The registered name of the cache spec (``"sliding_window"``).
        options: The spec's own fields, without ``block_size`` and ``dtype`` (``{"num_kv_heads": 1, "window": 64}``).
        query: The query side's fields (``{"num_heads": 4, "head_size": 32, "scale": 0.17}``); empty for a layer that
            does not attend.
        shares_with: The layer whose cache it reads; None for its own.
        entry_of: The layer of which this is an entry, as in ``LayerSpec``; None for a layer.
        inputs: The names of what the model gives the layer's attention beside query, key and value.
    """

    name: str
    kind: str
    options: Mapping[str, Any]
    query: Mapping[str, Any]
    shares_with: str | None = None
    entry_of: str | None = None
    inputs: frozenset[str] = frozenset()

    def share_of_heads(self, num_ranks: int) -> LayerDescription:
        """Return the layer with the heads of one of several equal ranks.

        If there are fewer KV heads than ranks, each rank has one of them, and several ranks have the same one. A layer
        without KV heads, such as one that keeps a latent vector or a state, keeps all of it on each rank.

        Raises:
            ModelError: The ranks do not divide the heads.
        """
        options, query = dict(self.options), dict(self.query)
        for heads, key in ((query, "num_heads"), (options, "num_kv_heads")):
            number = heads.get(key, num_ranks)
            if number % num_ranks and (key == "num_heads" or num_ranks % number):
                raise ModelError(f"layer {self.name!r} has {key} = {number}, which {num_ranks} ranks do not divide")
            if key in heads:
                heads[key] = max(1, number // num_ranks)
        return attrs.evolve(self, options=options, query=query)


PoolingMode = Literal["mean", "cls", "last"]
"""Which hidden states of a text make its embedding: the mean of all tokens', the first token's, the last token's."""


@attrs.frozen
class Pooling:
    """How hidden states become an embedding: of which tokens, and whether it is divided by its length."""

    mode: PoolingMode
    normalize: bool = False


@attrs.frozen(kw_only=True)
class ModelDescription:
    """What planning and serving need to know of a model, read without its weights.

    Attributes:
        name: The folder's or file's name, for messages.
        layers: Its layers that attend or keep state, in the order they run.
        max_model_len: The most tokens of a request, prompt and output.
        vocab_size: Token ids are ``[0, vocab_size)``; None if unknown.
        eos_token_ids: Ids that end a request.
        max_input_lens: For each sequence that requests have beside their own tokens (``"encoder"``), the most tokens
            of it.
        bidirectional_prompts: Whether the tokens of a prompt see each other in both directions, and generated tokens
            see earlier ones only (PaliGemma, arXiv 2407.07726). Each whole prompt is then a range of such tokens.
        generates: Whether it gives logits for a next token; False for a model that is used for its hidden states.
        num_prediction_heads: How many prediction heads it has (multi-token prediction): each guesses one more of the
            tokens that follow the next one (``LoadedModel.load_prediction_heads``).
        sampling: How the checkpoint wants tokens to be chosen: values by the names of ``SamplingParams``, for requests
            that name none.
        prediction_layers: What these heads attend with and keep, with other names than ``layers``. They are planned if
            the stack's proposer uses the heads. The last one keeps the hidden states after a request's last token,
            ``[num_prediction_heads, hidden_size]``: those of the model, then those of each head but the last.
    """

    name: str
    layers: tuple[LayerDescription, ...]
    max_model_len: int
    vocab_size: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    max_input_lens: Mapping[str, int] = attrs.field(factory=dict)
    bidirectional_prompts: bool = False
    generates: bool = True
    num_prediction_heads: int = 0
    sampling: Mapping[str, Any] = attrs.field(factory=dict)
    prediction_layers: tuple[LayerDescription, ...] = ()


@attrs.frozen(kw_only=True)
class ModelShare:
    """What one of several equal ranks holds of a model, known before anything is loaded.

    Attributes:
        layers: The model's layers, with the heads of one rank.
        weight_bytes: The bytes of the rank's weights on its device; None if that is not known.
        num_parameters: The number of its weights; None if that is not known.
        weights: What is counted, in words (``"8,030,261,248 parameters in bfloat16"``).
        refusal: Why ``load`` cannot divide the model over so many ranks; None if it can.
        lacks: What ``load`` would lack on this machine, or do otherwise here, one sentence each.
    """

    layers: tuple[LayerDescription, ...]
    weight_bytes: int | None = None
    num_parameters: int | None = None
    weights: str = ""
    refusal: str | None = None
    lacks: tuple[str, ...] = ()
