"""The groups of a plan by what they store: every block that a step computes, few of them, or the blocks of inputs."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvframe.cache.block_table import BlockTables, TableStack
from kvframe.cache.live_range import LiveRange
from kvframe.contract.specs import KVCacheSpec
from kvframe.planning.answers import Answers
from kvframe.planning.plan import KVCachePlan, PlannedGroup


@attrs.frozen(eq=False)
class GroupKinds:
    """Which groups are treated alike.

    Attributes:
        groups: All groups of the plan.
        of_tokens: Those that keep state of requests' own tokens.
        stacks: The block tables of these.
        dense: The groups of tokens that store every block that a step computes.
        sparse: The other groups of tokens: their types say at each step which blocks they store.
        live: For each group of tokens, by its index, when its blocks die.
        asked: The answers of the types whose live ranges no mask says: they are checked as far as requests get.
        is_plain: Whether every group is dense: then a batch of rows needs no look at each.
    """

    groups: tuple[PlannedGroup, ...]
    of_tokens: tuple[PlannedGroup, ...]
    stacks: tuple[TableStack, ...]
    dense: tuple[PlannedGroup, ...]
    sparse: tuple[PlannedGroup, ...]
    live: Mapping[int, LiveRange]
    asked: tuple[Answers, ...]
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
        # Groups of one type have one live range, which is worked out once.
        of_type = {group.spec.group_key: group.answers for group in of_tokens}
        live = {key: LiveRange.of(answers, plan.max_model_len) for key, answers in of_type.items()}
        return cls(
            groups=plan.groups,
            of_tokens=of_tokens,
            stacks=tuple(stack for stack in tables.stacks if not plan.groups[stack.groups[0]].is_of_input),
            dense=dense,
            sparse=sparse,
            live={group.index: live[group.spec.group_key] for group in of_tokens},
            asked=tuple(answers for key, answers in of_type.items() if not live[key].is_by_mask),
            is_plain=not sparse and len(of_tokens) == len(plan.groups),
        )
