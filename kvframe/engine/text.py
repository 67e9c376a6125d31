"""Tokens to text, piece by piece: whole characters only, cut before a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

NUM_CONTEXT_TOKENS = 5
"""Prompt tokens decoded along with the first generated ones: a space that begins the output is then not lost."""

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """The text of one request's generated tokens, as far as it is certain.

    Invariant: ``text`` only ever grows, and no later token changes what is already in it.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int], stop: Sequence[str] = ()
    ) -> None:
        """Start after the prompt.

        Args:
            decode: Turns token ids into text.
            prompt_token_ids: The prompt; its last tokens are the context of the first generated ones.
            stop: Strings that end the text; the text is cut before the first of them.
        """
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        self._held = ""
        self._read = len(prompt_token_ids)
        self._context = max(0, self._read - NUM_CONTEXT_TOKENS)

    def feed(self, token_ids: Sequence[int], *, final: bool) -> None:
        """Take in the tokens that were not seen yet. Safe to call again with the same tokens.

        Args:
            token_ids: Prompt and generated tokens, those of the earlier calls first.
            final: Whether these are all: incomplete characters and held-back text then come out as they are.
        """
        if self.stopped:
            return
        pending = self._held + self._decode_new(token_ids, final)
        found = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.text += pending[: min(found)]
            self._held = ""
            self.stopped = True
            return
        keep = 0 if final else self._possible_stop(pending)
        self.text += pending[: len(pending) - keep]
        self._held = pending[len(pending) - keep :]

    def _decode_new(self, token_ids: Sequence[int], final: bool) -> str:
        """Return the text of the unread tokens; empty while it ends within a character."""
        if self._read == len(token_ids):
            return ""
        # Decoded with the tokens before them, since a token's text may depend on its neighbours.
        before = self._decode(token_ids[self._context : self._read]).rstrip(_INCOMPLETE)
        after = self._decode(token_ids[self._context :])
        if after.endswith(_INCOMPLETE) and not final:
            return ""
        self._context, self._read = self._read, len(token_ids)
        return after[len(before) :]

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest end of ``text`` with which a stop string begins."""
        longest = min(len(text), max((len(stop) - 1 for stop in self._stop), default=0))
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
