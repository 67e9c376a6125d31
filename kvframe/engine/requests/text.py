"""Turns the tokens of one request into text as they come: whole characters only, and cut before a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvframe.engine.requests.stops import NO_STOPS, StopStrings

NUM_CONTEXT_TOKENS = 5
"""Prompt tokens that are decoded with the first generated ones, so that a space at the start of the output is kept."""

MAX_WINDOW_TOKENS = 16
"""Tokens that are decoded together; if there are more, the window moves on to the last ones."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one request's generated tokens, as far as it is certain.

    Invariant: ``text`` only ever grows, and no later token changes what is already in it.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt_token_ids: Sequence[int],
        stop: StopStrings = NO_STOPS,
        decode_stream: Callable[[Sequence[int]], Callable[[Sequence[int]], str] | None] | None = None,
    ) -> None:
        """Start after the prompt.

        Args:
            decode: Turns token ids into text.
            prompt_token_ids: The prompt; its last tokens are the context of the first generated ones.
            stop: Strings that end the text; the text is cut before the first of them.
            decode_stream: ``LoadedModel.decode_stream``; None to decode each token with a few before it.
        """
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stop = stop
        self._state = 0
        self._held = ""
        self._read = len(prompt_token_ids)
        self._context = max(0, self._read - NUM_CONTEXT_TOKENS)
        # The text of the tokens from the context to the last one read; None if it is to be decoded.
        self._before: str | None = None
        # Opens a stream; None if there is none, or if one was given up.
        self._start_stream = decode_stream
        # The stream: decodes the tokens after those that it was given, ``_given`` of all; None while none is open.
        self._decode_next: Callable[[Sequence[int]], str] | None = None
        self._given = self._read

    def feed(self, token_ids: Sequence[int], *, final: bool) -> None:
        """Read the new tokens. Safe to call again with the same tokens.

        Args:
            token_ids: Prompt and generated tokens, those of the earlier calls first.
            final: Whether these are all tokens: incomplete characters and held-back text are then put out as they are.
        """
        if self.stopped:
            return
        new = self._decode_new(token_ids, final)
        if self._stop is NO_STOPS:
            self.text += new
            return
        pending = self._held + new
        reading = self._stop.read(self._state, new)
        if reading.found_at is not None:
            self.text += pending[: len(self._held) + reading.found_at]
            self._held = ""
            self.stopped = True
            return
        self._state = reading.state
        num_held = 0 if final else reading.num_held
        self.text += pending[: len(pending) - num_held]
        self._held = pending[len(pending) - num_held :]

    def _decode_new(self, token_ids: Sequence[int], final: bool) -> str:
        """Return the text of the unread tokens; empty while it ends within a character."""
        if self._read == len(token_ids):
            return ""
        if self._decode_next is None and self._start_stream is not None:
            self._open_stream(token_ids)
        if self._decode_next is not None:
            try:
                new = self._decode_next(token_ids[self._given :])
                self._given = len(token_ids)
            except Exception:
                new = ""
            if new:
                self._move_on(self._given)
                return new
            if not final and len(token_ids) == self._given <= self._read + MAX_WINDOW_TOKENS:
                return ""
            # The stream failed, or the end of a character does not come: the tokens are decoded as they are.
            self._decode_next = self._start_stream = self._before = None
        # The tokens before them are decoded too, because a token's text may depend on its neighbours.
        before, after = self._decode_context(token_ids), self._decode(token_ids[self._context :])
        if after.endswith(_INCOMPLETE) and not final:
            return ""
        if not after.startswith(before):
            before = before.rstrip(_INCOMPLETE)  # the prompt ends within a character, which is complete now
        new, self._before = after[len(before) :], after
        self._move_on(len(token_ids))
        return new

    def _move_on(self, num_read: int) -> None:
        """Record that tokens were read. A context that gets too long begins anew, between two characters."""
        if num_read - self._context > MAX_WINDOW_TOKENS:
            self._context, self._before = self._read, None
        self._read = num_read

    def _open_stream(self, token_ids: Sequence[int]) -> None:
        """Open a stream after the tokens read, unless they end within a character, which would come out incomplete."""
        assert self._start_stream is not None
        if self._decode_context(token_ids).endswith(_INCOMPLETE):
            return
        self._decode_next, self._given = self._start_stream(token_ids[self._context : self._read]), self._read
        if self._decode_next is None:
            self._start_stream = None

    def _decode_context(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens from the context to the last one read."""
        if self._before is None:
            self._before = self._decode(token_ids[self._context : self._read])
        return self._before
