"""The costs of the two forms of latent attention: absorbed, or with expanded keys and values."""

from __future__ import annotations

import attrs

from kvframe_mla.dense_batches import IntArray


@attrs.frozen
class Cost:
    """Multiply-adds per head, from the sizes of a layer. A projection turns one latent into one head's key and value.

    Both forms have projections, of ``projection = latent_size * (nope_size + head_size_v)`` each, and products for each
    visible pair of query and token:

    * *absorbed* (DeepSeek-V2, arXiv 2405.04434, section 2.1.2: the up-projection of keys is applied to the queries,
      that of values after the sum): ``num_queries`` projections, and per pair
      ``(latent_size + rope_size) + latent_size``;
    * *expanded*: ``num_tokens`` projections, and per pair ``(nope_size + rope_size) + head_size_v``.

    Absorbed attention saves ``(num_tokens - num_queries) * projection``. It costs more for its longer vectors:
    ``num_pairs * (2 * latent_size - nope_size - head_size_v)``. With DeepSeek-V3's sizes it is cheaper for up to 170
    queries on a long context, and never for a prompt without a past.

    Attributes:
        projection: Multiply-adds of one projection.
        extra: The additional cost of a pair in the absorbed form; negative if it costs less.
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
            num_tokens: ``[num_reqs]``: the tokens that the last of them sees, including its own.
        """
        # As floats, because a long prompt's pairs times a number of elements may exceed 2**63.
        queries, tokens = num_queries.astype(float), num_tokens.astype(float)
        pairs = queries * (tokens - (queries - 1) / 2)
        cheaper: IntArray = (tokens - queries) * self.projection > pairs * self.extra
        return cheaper
