"""Which form of latent attention costs less: absorbed, or with keys and values."""

from __future__ import annotations

import attrs

from kvframe_mla.pieces import IntArray


@attrs.frozen
class Cost:
    """Multiply-adds per head, from the sizes of a layer; a projection is what takes a latent to a head's key and value.

    Both forms project once per query or token, ``projection = latent_size * (nope_size + head_size_v)``, and once per
    visible pair of query and token multiply:

    * *absorbed* (DeepSeek-V2, arXiv 2405.04434, section 2.1.2: the up-projection of keys moves to the queries, that of
      values after the sum): ``num_queries`` projections, and per pair ``(latent_size + rope_size) + latent_size``;
    * *expanded*: ``num_tokens`` projections, and per pair ``(nope_size + rope_size) + head_size_v``.

    So absorbed attention costs less where what it saves in projections, ``(num_tokens - num_queries) * projection``,
    is more than what its longer vectors cost, ``num_pairs * (2 * latent_size - nope_size - head_size_v)``. For
    DeepSeek-V3's sizes that is up to 170 queries on a long context, and never for a prompt without one.

    Attributes:
        projection: Multiply-adds of one projection.
        extra: What a pair costs more where it is absorbed; negative where it costs less.
    """

    projection: int
    extra: int

    @classmethod
    def of(cls, latent_size: int, nope_size: int, head_size_v: int) -> Cost:
        """Return the cost for a layer's sizes."""
        return cls(latent_size * (nope_size + head_size_v), 2 * latent_size - nope_size - head_size_v)

    def absorbs(self, num_queries: IntArray, num_tokens: IntArray) -> IntArray:
        """Return whether absorbed attention costs less, ``[num_reqs], bool``.

        Args:
            num_queries: ``[num_reqs]``: each request's new tokens.
            num_tokens: ``[num_reqs]``: the tokens that the last of them sees, its own included.
        """
        # As floats: a long prompt's pairs times an element count may pass 2**63.
        queries, tokens = num_queries.astype(float), num_tokens.astype(float)
        pairs = queries * (tokens - (queries - 1) / 2)
        cheaper: IntArray = (tokens - queries) * self.projection > pairs * self.extra
        return cheaper
