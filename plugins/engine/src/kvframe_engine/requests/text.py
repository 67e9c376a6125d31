"""Turns the tokens of one request into text as they come, and cuts the text before a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvframe_engine.requests.stops import NO_STOPS, StopStrings


class TextStream:
    """The text of one request's generated tokens, as far as it is certain.

    The model's ``decode_stream`` defines the text. It is the same however the tokens are divided into calls.

    Invariant: ``text`` only ever grows, and no later token changes what is already in it.
    """

    def __init__(
        self,
        decode_stream: Callable[[Sequence[int]], Callable[[Sequence[int], bool], str]],
        prompt_token_ids: Sequence[int],
        stop: StopStrings = NO_STOPS,
    ) -> None:
        """Start after the prompt.

        Args:
            decode_stream: ``LoadedModel.decode_stream``. It is called when tokens are first read.
            prompt_token_ids: The prompt.
            stop: Strings that end the text; the text is cut before the first of them that is complete.
        """
        self.text = ""
        self.stopped = False
        self._decode_stream = decode_stream
        self._decode_next: Callable[[Sequence[int], bool], str] | None = None
        self._stop = stop
        self._state = 0
        self._held = ""
        self._num_read = len(prompt_token_ids)
        self._is_final = False

    def feed(self, token_ids: Sequence[int], *, final: bool) -> None:
        """Read the new tokens. Safe to call again with the same tokens.

        Args:
            token_ids: Prompt and generated tokens, those of the earlier calls first.
            final: Whether these are all tokens: incomplete characters and held-back text are then put out as they are.
        """
        if self.stopped or self._is_final or (len(token_ids) <= self._num_read and not final):
            return
        if self._decode_next is None:
            self._decode_next = self._decode_stream(token_ids[: self._num_read])
        new_text = self._decode_next(token_ids[self._num_read :], final)
        self._num_read = len(token_ids)
        self._is_final = final
        if self._stop is NO_STOPS:
            self.text += new_text
            return
        pending = self._held + new_text
        reading = self._stop.read(self._state, new_text)
        if reading.found_at is not None:
            self.text += pending[: len(self._held) + reading.found_at]
            self._held = ""
            self.stopped = True
            return
        self._state = reading.state
        num_held = 0 if final else reading.num_held
        self.text += pending[: len(pending) - num_held]
        self._held = pending[len(pending) - num_held :]
