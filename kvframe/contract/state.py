"""Steps of state layers: which tokens a model computes together, from which states, and where the new states go.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvframe.contract.errors import ModelError

if TYPE_CHECKING:
    import torch

    States = dict[str, torch.Tensor]
    Pages = Mapping[str, torch.Tensor]


@attrs.frozen(eq=False)
class StateRound:
    """One token of each of several requests, to be computed together.

    In a step that is padded to the size of a graph, added rows have places in the null page.

    Attributes:
        rows: ``[num_rows], int64, device``: the packed tokens, each of another request; of added rows, the last packed
            token, which is padding.
        source_pages: ``[num_rows], int64, device``: the page with the state before the token. Each of these tokens has
            one. It is the block id at which the layers find the state: of a rollback page, that of one of its parts.
        source_places: ``[num_rows], int64, device``: which of the page's states that is.
        target_pages: ``[num_rows], int64, device``: the page that gets the state after the token. All differ, except
            those of added rows.
        target_places: ``[num_rows], int64, device``: which of its states.
    """

    rows: torch.Tensor
    source_pages: torch.Tensor
    source_places: torch.Tensor
    target_pages: torch.Tensor
    target_places: torch.Tensor

    def read(self, pages: Pages) -> States:
        """Return the states before the tokens: copies ``[num_rows, *shape]`` by name."""
        return {name: tensor[self.source_pages, self.source_places] for name, tensor in pages.items()}

    def write(self, pages: Pages, states: Mapping[str, torch.Tensor]) -> None:
        """Write the states after the tokens, ``[num_rows, *shape]`` by name, into their pages."""
        for name, tensor in pages.items():
            _check_state(name, states[name], (len(self.rows), *tensor.shape[2:]))
            tensor.index_put_((self.target_pages, self.target_places), states[name].to(tensor.dtype))


@attrs.frozen
class StateRun:
    """Consecutive tokens of one request; only the state after the last of them is kept.

    Attributes:
        start: The first packed row.
        stop: The row after the last one.
        source: Page, and which of its states, before the first token; None if the request has no earlier token.
        target: Page, and which of its states, that gets the state after the last token.
    """

    start: int
    stop: int
    source: tuple[int, int] | None
    target: tuple[int, int]

    def read(self, pages: Pages) -> States | None:
        """Return the state before the first token, copies ``[1, *shape]`` by name; None if there is none."""
        if self.source is None:
            return None
        page, index = self.source
        return {name: tensor[page, index].unsqueeze(0).clone() for name, tensor in pages.items()}

    def write(self, pages: Pages, states: Mapping[str, torch.Tensor]) -> None:
        """Write the state after the last token, ``[1, *shape]`` by name, into its page."""
        page, index = self.target
        for name, tensor in pages.items():
            _check_state(name, states[name], (1, *tensor.shape[2:]))
            tensor[page, index].copy_(states[name][0])


@attrs.frozen(eq=False)
class StateStep:
    """What one step computes, as the state layers of a cache group see it.

    Every packed token is in exactly one round or run; padded rows are in none. Rounds and runs read what earlier ones
    of the step wrote, so they are taken in order: all rounds, then all runs.

    Attributes:
        rounds: Tokens of requests that compute few: the first of each, the second of those that have one, and so on.
        runs: Tokens of the other requests, divided after each token whose state is kept. A request without earlier
            tokens has runs.
    """

    rounds: tuple[StateRound, ...]
    runs: tuple[StateRun, ...]


def _check_state(name: str, state: torch.Tensor, shape: tuple[int, ...]) -> None:
    # A state of another shape could be broadcast over all requests.
    if state.shape != shape:
        raise ModelError(
            f"the model gives a state {name!r} of the shape {list(state.shape)}, and its page takes {list(shape)}: "
            "this is a mistake in the model adapter"
        )
