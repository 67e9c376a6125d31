"""The order of a batch's requests: what a backend asks for."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class BatchOrder:
    """The order of requests that a backend asks for, so that each kind of them is one slice of the batch.

    Decodes come first: requests of at most ``decode_threshold`` new tokens. Extends are longer and have tokens in the
    cache before this step; fresh prefills have none. Padded rows, without new tokens, come last.

    Attributes:
        decode_threshold: The most new tokens of a decode.
        extends_first: Whether extends come before fresh prefills; if not, the two may be mixed.
    """

    decode_threshold: int = 1
    extends_first: bool = False
