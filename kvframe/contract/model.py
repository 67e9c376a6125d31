"""The interface of a model adapter: it describes a model without weights, and runs it on packed batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from kvframe.contract.description import ModelDescription, ModelShare, Pooling
from kvframe.contract.errors import ModelError, RequestError
from kvframe.contract.growth import Growing

if TYPE_CHECKING:
    import torch

    from kvframe.contract.choice import ChosenTokens
    from kvframe.contract.entries import EntryStep
    from kvframe.contract.state import StateStep

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Stands for an incomplete character in decoded text."""


@attrs.frozen(kw_only=True, eq=False)
class ModelInput:
    """The input of a request besides its own tokens, checked and ready to be computed, on the host.

    Attributes:
        num_tokens: Tokens of the sequence that the model computes from it, at least one.
        key: A hash of its content, of 128 bits or more, the same in every process. Inputs with equal keys share what
            is computed from them. The engine combines it with a secret (``kvframe.content_key``) before using it.
        data: What the model computes the sequence from.
    """

    num_tokens: int
    key: bytes
    data: Any


@attrs.frozen(kw_only=True, eq=False)
class ModelIdentity:
    """What determines the output of a model: two models with equal identities compute equal states.

    Attributes:
        config: Everything besides the weights that determines it, as text that is equal each time the model is loaded.
        weights: Its weights by name, the same on all ranks: a rank that has loaded a part of a weight gives the whole
            one, for example mapped from the checkpoint's file.
    """

    config: str
    weights: Mapping[str, torch.Tensor]


class Attend(Protocol):
    """Computes the attention of one layer: what a model calls instead of its own attention."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
        *,
        chosen: ChosenTokens | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: ``[num_rows, num_heads, head_size]`` to ``[num_rows, num_heads, head_size_v]``, device.

        ``chosen`` is given to a layer whose query side has a ``choice``, and ``inputs`` to one whose description names
        inputs. The log-sum-exp is written to ``lse``, ``[num_rows, num_heads], device``, in ``lse_dtype`` of the
        query's dtype; it is given to a layer whose query side says that the model merges it.
        """


class AttachedLayer(Attend, Protocol):
    """One attention layer of the host that serves a model."""

    def bind(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take the learned tensors of the layer's attention, once, before the first step."""


class AttachedState(Protocol):
    """One state layer of the host: the model computes it on the pages that it is given."""

    @property
    def pages(self) -> Mapping[str, torch.Tensor]:
        """Its state tensors by name, each ``[num_block_ids, states_per_block, *shape], device``."""

    @property
    def step(self) -> StateStep:
        """What the current step computes."""


class AttachedEntry(Protocol):
    """One entry of a layer, which the model writes and reads itself (``LayerDescription.entry_of``)."""

    @property
    def step(self) -> EntryStep:
        """Where the current step's requests have it."""


class AttachedLayers(Protocol):
    """All layers that the host gives a model, by the names of its description."""

    @property
    def skipped(self) -> tuple[str, ...]:
        """The attention layers that compute only some rows of a step, in the order they run."""

    @property
    def states(self) -> Mapping[str, AttachedState]:
        """The layers that keep a state and do not attend."""

    @property
    def entries(self) -> Mapping[str, AttachedEntry]:
        """The entries that the description has, by their full names."""

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """The dtypes of the stored state of all layers."""

    @property
    def kept_rows(self) -> torch.Tensor | None:
        """``[num_kept], int64, device``: the rows that the skipped layers compute in this step; None for all."""

    def __getitem__(self, name: str, /) -> AttachedLayer:
        """Return an attention layer."""


class LoadedModel(Growing, ABC):
    """A model with its weights, ready to be attached to an engine's attention layers."""

    description: ModelDescription

    def without_head(self) -> LoadedModel:
        """Return the model that gives hidden states instead of logits, for embeddings.

        The hidden states are the last ones, as the model's own head would take them: ``forward`` and the ``run_packed``
        of ``self_check`` give ``[…, hidden_size]`` instead of ``[…, vocab_size]``. The weights are the same; one of the
        two is attached at a time. A model whose description says that it does not generate returns itself.

        Raises:
            ModelError: The model gives no hidden states.
        """
        if not self.description.generates:
            return self
        raise ModelError(f"{self.description.name} gives logits only, and no hidden states to make embeddings of")

    def pooling(self) -> Pooling | None:
        """Return how hidden states become an embedding; None if the checkpoint does not say.

        Raises ``ModelError`` if the checkpoint names a way that kvframe does not know.
        """
        return None

    def tokenizer_json(self) -> str | None:
        """Return the tokenizer in the JSON format of the library ``tokenizers``; None, the default, if there is none.

        Called when the first request names a logits processor.
        """
        return None

    def identity(self) -> ModelIdentity | None:
        """Return what distinguishes this model from models that compute something else.

        Called when states are saved to a file or loaded from one, and when several ranks begin to serve one model. None
        if the model cannot tell: then nothing is saved, and the model does not run over ranks.
        """
        return None

    def can_skip(self, layers: Sequence[str]) -> bool:
        """Return whether ``forward`` can leave out rows from the first of these layers on (prefill skipping).

        Called at set-up, before ``attach``, and only if the stack asks for prefill skipping. A model that returns True
        reads ``kept_rows`` of the attached layers in each ``forward``.

        Args:
            layers: The names of the model's last attention layers, none of which keeps a cache of its own, in the
                order they run; at least one.
        """
        return False

    @abstractmethod
    def attach(self, layers: AttachedLayers) -> None:
        """Route the model's attention through the host's layers; raises ``ModelError`` if a layer was not reached.

        Called once, at set-up. The model calls its attention layers, and computes its ``states`` on their pages.
        """

    @abstractmethod
    def self_check(self, run_packed: Any) -> None:
        """Compare a packed run with the model's own plain forward; raises ``ModelError`` if logits differ.

        Args:
            run_packed: ``run_packed(prompts: list[list[int]], last_only: bool = False, inputs = ()) ->
                list[torch.Tensor]``: logits ``[len(prompt), vocab_size]`` of each prompt, computed through the attached
                layers together, in one step or in several. With ``last_only``, only the last token of each prompt
                generates, and its logits ``[1, vocab_size]`` come back. A model that can skip compares these too, if
                its layers skip something. ``inputs`` holds for each prompt what it brings beside its tokens, by
                sequence: ``{"encoder": ModelInput(…)}``.
        """

    @abstractmethod
    def detach(self) -> None:
        """Restore the model to its state before ``attach``. Safe to call twice."""

    def weights_changed(self) -> None:
        """Make again what was made of the weights, such as tensors that were bound to layers. The default does nothing.

        Called between steps, after the weights of a model in memory were changed. Raises ``ModelError`` if they cannot
        be served.
        """

    def weights_version(self) -> int | None:
        """Return a number that is another one after the weights of a model in memory were changed.

        Called when a host begins to serve after it was idle, so that it can warn if ``weights_changed`` was forgotten.
        None, the default, if that is not known.
        """
        return None

    def compile(self, backend: Any = "inductor") -> None:
        """Let ``forward`` run compiled by ``torch.compile``, around the attention, until ``detach``.

        Called at set-up, after ``attach``, if the stack asks for it. ``backend`` is what compiles: a name that torch
        knows, or a callable as ``torch.compile`` takes it. Raises ``ModelError`` if the model cannot be compiled here.
        """
        raise ModelError(f"{self.description.name} cannot be compiled by its model adapter; leave compile out")

    @abstractmethod
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Run one packed step; the attention layers already hold the step's metadata.

        In a step whose ``AttachedLayers.kept_rows`` is not None, the layers in ``AttachedLayers.skipped`` are called
        with the queries of these rows alone, in their order, and what the model computes before the first of them it
        computes for all rows. A model whose ``can_skip`` returned False never sees such a step.

        Args:
            input_ids: ``[num_tokens], int64, device``.
            positions: ``[num_tokens], int64, device``.
            logits_indices: ``[num_wanted], int64, device``: the rows of the packed batch whose logits are wanted.

        Returns:
            Logits ``[num_wanted, vocab_size], device``, of ``logits_indices``; in a step with ``kept_rows``, logits
            ``[num_kept, vocab_size]`` of exactly these rows, padding included. Of a model without head, hidden states
            ``[…, hidden_size]`` of the same rows.
        """

    def can_give_hidden_states(self) -> bool:
        """Return whether the model has ``forward_with_hidden_states``. The default says no.

        Called at set-up, before ``attach``, and only if the stack's proposer needs hidden states.
        """
        return False

    def give_hidden_states(self, *, of_all_tokens: bool = False) -> None:
        """Prepare for ``forward_with_hidden_states``, until ``detach``. The default does nothing.

        Called at set-up, after ``attach`` and before ``compile``, if ``can_give_hidden_states`` returned True, or if
        the model's prediction heads are used.

        Args:
            of_all_tokens: Whether the states are for the prediction heads, which continue from the last ones of all
                tokens. If not, what the model's head takes the logits from is wanted.
        """

    def forward_with_hidden_states(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one packed step as ``forward`` does, and return hidden states as well.

        Called instead of ``forward`` after ``give_hidden_states``.

        Returns:
            The logits, and a hidden state for each of their rows, ``[num_logits_rows, hidden_size], device``; or for
            each token, ``[num_tokens, hidden_size]``.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no hidden states")

    def load_prediction_heads(self) -> PredictionHeads | None:
        """Return the model's prediction heads (multi-token prediction), with their weights; None on ranks other than 0.

        Called at set-up, before ``attach``, and only if the stack's proposer uses the heads and the description has
        ``prediction_layers``. If several processes serve the model together, each of them calls this, and rank 0 alone
        runs the heads. So they need all weights in its process, those that they share with the model too.

        Raises ``ModelError`` if the checkpoint has no weights of the heads, or they cannot be loaded.
        """
        raise ModelError(f"{self.description.name} has no prediction heads")

    # --- inputs besides tokens: for a model whose description has ``max_input_lens`` ----------------------------------

    def prepare_input(self, sequence: str, value: Any) -> ModelInput | None:
        """Check an input sequence of a request, and make it ready. Called once for each request.

        Args:
            sequence: A name of ``max_input_lens`` (``"encoder"``).
            value: Text, token ids, or features as a tensor or an array, as the user gave it; None if the request has
                none.

        Returns:
            The input; None if the request has none and the model can compute without it.

        Raises:
            RequestError: The model does not take such a value (``bad_input``), or needs one (``missing_input``).
            ModelError: The value is text, and the model has no tokenizer.
        """
        raise RequestError(f"{self.description.name} takes no {sequence} input", code="bad_input")

    def start_token_ids(self, text: str | None = None) -> list[int]:
        """Return the first tokens of a request with an input: the model's start tokens, then those of a text if given.

        Raises ``ModelError`` if the model has no such tokens, or no tokenizer for the text.
        """
        raise ModelError(f"{self.description.name} does not say which token a request starts with; give token ids")

    def compute_inputs(self, inputs: Mapping[str, Sequence[ModelInput]]) -> None:
        """Compute the input sequences of a step's new requests, for the next ``forward`` only.

        Called before ``forward`` in each step of a model that takes inputs; in most steps without any. The layers that
        keep state of a sequence are then called with the keys and values of the new inputs alone, packed in their
        order; in a step without inputs, they ignore the keys and values that they are given.

        Args:
            inputs: By sequence, the inputs whose state the step stores, in the order of their requests.
        """
        raise NotImplementedError(f"{type(self).__name__} takes inputs and does not compute them")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``; raises ``ModelError`` if the model has no tokenizer."""
        raise self._no_tokenizer()

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the token ids of a conversation, in the form that the model was trained on, up to its next answer.

        Called by ``kvframe chat`` before each answer. The default refuses.

        Args:
            messages: From the first to the last, each with ``role`` (``"system"``, ``"user"`` or ``"assistant"``) and
                ``content``, its text. The last is the user's.

        Raises:
            ModelError: The model has no such form, or its form does not take these messages.
        """
        raise ModelError(f"{self.description.name} has no chat template; `kvframe generate` continues a text")

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids``; None if the model has no tokenizer."""
        return None

    def decode_with_special_tokens(self, token_ids: Sequence[int]) -> str | None:
        """Return the text of ``token_ids`` in which special tokens have a text, too; None, the default, if it cannot.

        Needed for requests with ``special_tokens=True``. For such requests, ``decode_stream`` is called with
        ``special_tokens=True``, and for no others.
        """
        return None

    def decode_stream(
        self, token_ids: Sequence[int], *, special_tokens: bool = False
    ) -> Callable[[Sequence[int], bool], str]:
        """Return a function that decodes the tokens of one request as they come.

        Called when the first generated tokens of a request are read. Each call of the function gets the tokens after
        those of the last call, and whether these are the last ones. It returns the text that they add, as far as later
        tokens cannot change it: no part of a character, for example. If it raises, the request ends with an error.

        All of this text together is what ``decode`` returns for all tokens of the request, after its common beginning
        with what ``decode`` returns for the prompt. So a character that the prompt begins belongs to the text if the
        generated tokens complete it, and to the prompt if they do not. It is the same text however the tokens are
        divided into calls. How it differs for tokens that are no valid text is up to the model.

        The default decodes all tokens in each call, so a long answer takes time quadratic in its length.

        Args:
            token_ids: The prompt.
            special_tokens: Whether special tokens have a text, as in ``decode_with_special_tokens``.
        """
        decode = self.decode_with_special_tokens if special_tokens else self.decode
        return _decode_again(lambda token_ids: decode(token_ids) or "", token_ids)

    def _no_tokenizer(self) -> Exception:
        return ModelError(f"{self.description.name} has no tokenizer; give token ids instead of text")


def _decode_again(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]
) -> Callable[[Sequence[int], bool], str]:
    """Return a function that decodes the prompt and all tokens so far, and returns what is new at the end."""
    tokens = [*token_ids]
    prompt, num_shown = decode(tokens), -1

    def decode_next(new_tokens: Sequence[int], final: bool) -> str:
        nonlocal num_shown
        tokens.extend(new_tokens)
        text = decode(tokens)
        text = text if final else text.rstrip(_INCOMPLETE)
        if num_shown < 0:
            if not final and len(text) <= len(prompt.rstrip(_INCOMPLETE)):
                return ""  # the tokens may complete the last character of the prompt
            num_shown = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, text, strict=False)))
        start, num_shown = num_shown, max(num_shown, len(text))
        return text[start:]

    return decode_next


class PredictionHeads(LoadedModel, Growing):
    """The prediction heads of a model (multi-token prediction, arXiv 2412.19437, 2.2), attached as a model is.

    Head ``i`` is computed for the tokens from position ``i + 1`` on. For the token at ``p`` it takes the token, and the
    hidden state after ``p - 1``: of the model for the first head, of the head before for the others. Its own hidden
    state after ``p`` gives the logits of the token at ``p + 1``. So what it stores of a token depends on the tokens up
    to that one only.
    """

    @abstractmethod
    def forward_head(
        self,
        head: int,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one head over one packed step; its attention layers already hold the step's metadata.

        Args:
            head: The head.
            input_ids: ``[num_tokens], int64, device``.
            positions: ``[num_tokens], int64, device``, all greater than ``head``.
            hidden_states: ``[num_tokens, hidden_size], device``: for each token, the hidden state after the one before.
            logits_indices: ``[num_wanted], int64, device``: the rows of the packed batch whose logits are wanted.

        Returns:
            Logits ``[num_wanted, vocab_size]``, and the head's hidden states ``[num_tokens, hidden_size]``, device.
        """

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Raise: a head continues hidden states."""
        raise NotImplementedError("prediction heads run by forward_head")

    def self_check(self, run_packed: Any) -> None:
        """Do nothing: a wrong head changes no token."""


@attrs.frozen(kw_only=True, eq=False)
class ModelInMemory:
    """A model that was not loaded by kvframe, with its device (``"cuda:0"``) and its dtype (``"float32"``) by name."""

    model: LoadedModel
    device: str
    dtype: str


class ModelAdapter(Growing, ABC):
    """Knows one way in which models lie on disk. Registered by a plugin; an instance is made at set-up."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Return whether ``path`` (a folder, or a config file) is of this adapter's kind. Cheap: no heavy import."""

    def find(self, name: str, *, weights: bool) -> Path | None:
        """Return the folder of the model that a name stands for; None, the default, if it is no name of a model.

        Called by commands for a name of two parts, ``owner/name``, if there is no such file or folder. The adapter may
        download what is missing. Raises ``ModelError`` if the name is one of a model that cannot be read here.

        Args:
            name: The name.
            weights: Whether ``load`` will be called; otherwise only what ``describe`` reads is needed.
        """
        return None

    @abstractmethod
    def describe(self, path: Path) -> ModelDescription:
        """Read the layers from the config alone; raises ``ModelError`` if it is not the config of a known model."""

    def dtype_of(self, path: Path) -> str | None:
        """Return the dtype of a checkpoint's weights by name, which a stack with ``dtype = "auto"`` takes.

        Called before ``describe`` and ``load``. None, the default, if the checkpoint does not say: it is float32 then.
        """
        return None

    @abstractmethod
    def load(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        """Load the weights from a folder; raises ``ModelError`` for a corrupt checkpoint.

        If several processes serve the model together, an adapter may load this process's share of it.
        """

    def load_whole(self, path: Path, *, device: str, dtype: str) -> LoadedModel:
        """Load a model that this process alone runs, although several processes serve another model together.

        Called on rank 0, for a draft model. The default is ``load``: right for an adapter that divides no model.
        """
        return self.load(path, device=device, dtype=dtype)

    def share_of_rank(self, path: Path, description: ModelDescription, *, dtype: str, num_ranks: int) -> ModelShare:
        """Return what each of ``num_ranks`` processes would hold of a model, without loading it.

        Called by ``kvframe plan`` and ``kvframe explain``, after ``describe``. The default divides heads, and does not
        know the weights. Raises ``ModelError`` if no rank could have an equal share.
        """
        return ModelShare(layers=tuple(layer.share_of_heads(num_ranks) for layer in description.layers))

    def adopt(self, model: Any, tokenizer: Any) -> ModelInMemory | None:
        """Take a model that is in memory already, with its tokenizer or None; None, the default, for an unknown object.

        The model stays its owner's: it may be called and trained between the engine's steps. Raises ``ModelError`` if
        the object is of a kind that this adapter knows, and cannot be served.
        """
        return None
