"""Whether two sets of times can be told apart, from one time each: a rank statistic with its interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np

Z = 1.96
"""Standard errors to each side of a 95 % interval."""
TOLERANCE = 0.05
"""How far from one half the share of right guesses may be, with all of its interval, to count as a guess."""


@attrs.frozen
class Telling:
    """How well one time tells of which of two sets it is.

    Attributes:
        right: The share of pairs, one time of each set, of which the longer one is of the first set, ties counted half:
            0.5 for no difference, 1 or 0 where they never overlap. (The area under the curve of Mann and Whitney.)
        low: The lower end of its 95 % interval.
        high: The upper end.
        p_value: How probable a share as far from one half is where there is no difference.
    """

    right: float
    low: float
    high: float
    p_value: float

    @property
    def is_guessing(self) -> bool:
        """Whether the whole interval is within the tolerance of one half."""
        return self.low > 0.5 - TOLERANCE and self.high < 0.5 + TOLERANCE

    @property
    def is_telling(self) -> bool:
        """Whether surely three of four pairs are told apart."""
        return max(self.low, 1 - self.high) > 0.75


def tell_apart(first: Sequence[float], second: Sequence[float]) -> Telling:
    """Compare two sets of times by their ranks (Mann and Whitney 1947; the interval is that of Hanley and McNeil 1982).

    Args:
        first: Times.
        second: Times, in the same unit.
    """
    m, n = len(first), len(second)
    values, places, counts = np.unique([*first, *second], return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    right = float((ranks[:m].sum() - m * (m + 1) / 2) / (m * n))
    ties = float((counts.astype(float) ** 3 - counts).sum())
    null_error = math.sqrt((m + n + 1 - ties / ((m + n) * (m + n - 1))) / (12 * m * n)) if len(values) > 1 else 0.0
    p_value = math.erfc(abs(right - 0.5) / null_error / math.sqrt(2)) if null_error else 1.0
    q1, q2 = right / (2 - right), 2 * right**2 / (1 + right)
    variance = right * (1 - right) + (m - 1) * (q1 - right**2) + (n - 1) * (q2 - right**2)
    error = math.sqrt(max(variance, 0.0) / (m * n))
    return Telling(right, max(0.0, right - Z * error), min(1.0, right + Z * error), p_value)
