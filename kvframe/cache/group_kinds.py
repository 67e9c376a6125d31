"""The groups of a plan by how their blocks come and go: as said by arrays of positions, or asked for each position."""

from __future__ import annotations

import attrs

from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.cache.forgetting import Forgetting, forgetting_of
from kvframe.plan import KVCachePlan, PlannedGroup
from kvframe.specs import KVCacheSpec


@attrs.frozen(eq=False)
class GroupKinds:
    """Which groups are treated alike.

    Attributes:
        groups: All groups of the plan.
        of_tokens: Those that keep state of requests' own tokens.
        stacks: The block tables of these.
        dense: The groups of tokens that store every block that a step computes.
        sparse: The other groups of tokens: their types say at each step which blocks they store.
        forgetting: For each dense group, by its index, how it forgets; None where only its live ranges say it.
        asked: The groups whose live ranges are asked position by position.
        is_plain: Whether every group is dense, of requests' own tokens and not asked: then a batch of rows needs no
            look at each.
    """

    groups: tuple[PlannedGroup, ...]
    of_tokens: tuple[PlannedGroup, ...]
    stacks: tuple[TableStack, ...]
    dense: tuple[PlannedGroup, ...]
    sparse: tuple[PlannedGroup, ...]
    forgetting: dict[int, Forgetting | None]
    asked: tuple[PlannedGroup, ...]
    is_plain: bool

    @classmethod
    def of(cls, plan: KVCachePlan, tables: BlockTables) -> GroupKinds:
        """Return the kinds of a plan's groups.

        Args:
            plan: The groups.
            tables: One block table per group.
        """
        of_tokens = tuple(group for group in plan.groups if not group.is_of_input)
        sparse = tuple(g for g in of_tokens if type(g.spec).stored_blocks is not KVCacheSpec.stored_blocks)
        dense = tuple(group for group in of_tokens if group not in sparse)
        forgetting = {group.index: forgetting_of(group.spec) for group in dense}
        asked = (*sparse, *(group for group in dense if forgetting[group.index] is None))
        return cls(
            groups=plan.groups,
            of_tokens=of_tokens,
            stacks=tuple(stack for stack in tables.stacks if not plan.groups[stack.groups[0]].is_of_input),
            dense=dense,
            sparse=sparse,
            forgetting=forgetting,
            asked=asked,
            is_plain=not asked and len(of_tokens) == len(plan.groups),
        )
