"""Makes the parts of an engine that serve requests over an assembly, and attaches the model to its layers."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence

from kvframe import KVCacheManager, Setup
from kvframe.contract import PageStore
from kvframe.contract.errors import StackError
from kvframe.contract.foreign import refuse_exit
from kvframe.contract.model import LoadedModel, PredictionHeads
from kvframe_engine.assembly import Assembly, assemble_plain
from kvframe_engine.contract.proposer import Proposer
from kvframe_engine.diagnosis import check_model, compare
from kvframe_engine.prefixes.fingerprint import layout_of
from kvframe_engine.ranks.follower import Follower
from kvframe_engine.ranks.leader import Leader
from kvframe_engine.ranks.leading_pages import LeadingPages
from kvframe_engine.requests.admission import Admission
from kvframe_engine.requests.progress import RequestT
from kvframe_engine.scheduling.drafting import Drafting
from kvframe_engine.scheduling.scheduler import Scheduler
from kvframe_engine.tiers.stored_pages import StoredPages
from kvframe_engine.tiers.tiers import Tiers


def make_admission(assembly: Assembly, secret: bytes) -> Admission:
    """Return the admission, which checks prompts against the limits of the model and its cache.

    Args:
        assembly: The set-up.
        secret: 32 bytes, for the keys of inputs.
    """
    in_one_step = assembly.setup.grouping.whole_prompts or assembly.model.description.bidirectional_prompts
    max_prompt_len = assembly.stack.limits.max_num_batched_tokens if in_one_step else None
    return Admission(
        assembly.model,
        assembly.plan,
        assembly.max_model_len,
        secret,
        assembly.stack,
        max_prompt_len=max_prompt_len,
        without_ranges=assembly.layers.without_ranges,
        caches_prefixes=assembly.setup.caches_prefixes,
    )


def make_manager(assembly: Assembly, *, poison_freed: bool) -> KVCacheManager:
    """Return the cache manager.

    Args:
        assembly: The set-up.
        poison_freed: Whether all pages are filled with NaN, now and when they are freed.

    Raises:
        StackError: The stack asks for an audit, and ``kvframe-testing`` is not installed.
    """
    cache, storage = assembly.stack.cache, assembly.storage
    manager = KVCacheManager(
        assembly.plan,
        max_num_seqs=assembly.stack.limits.max_num_seqs,
        prefix_caching=assembly.setup.caches_prefixes,
        copier=storage.copy_pages,
        mover=assembly.setup.make_mover(assembly.views),
        eviction=assembly.setup.make_part("eviction", assembly.stack.cache.eviction),
        max_kept_share=cache.max_kept_percent / 100,
    )
    if poison_freed:
        storage.poison()
        assembly.layers.local.is_poisoned = True
        manager.on_pages_freed = lambda group, block_ids: storage.fill(group, block_ids, math.nan)
    if cache.audit:
        _audit(manager, assembly.stack.source)
    return manager


def _audit(manager: KVCacheManager, source: str) -> None:
    """Let every verb of a cache manager check that pages are counted right; raise a ``StackError`` without the kit."""
    try:
        kit = importlib.import_module("kvframe_testing.audit")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("kvframe_testing"):
            raise
        raise StackError(
            f"{source}: cache.audit counts pages by kvframe-testing, which is not installed; try: "
            "pip install kvframe-testing"
        ) from error
    kit.audit_each_verb(manager)


def make_page_stores(setup: Setup) -> list[PageStore]:
    """Return the stack's page stores; none if it caches no prefixes.

    Raises:
        StackError: A store cannot be made.
    """
    return setup.make_page_stores() if setup.caches_prefixes else []


def make_stored_pages(
    assembly: Assembly,
    stores: Sequence[PageStore],
    secret: bytes,
    fingerprint: Callable[[], Mapping[str, str]],
    ranks: Leader | Follower | None,
) -> StoredPages | None:
    """Return what moves this rank's pages from and to page stores; None if the stack has none.

    Args:
        assembly: The set-up.
        stores: The page stores.
        secret: 32 bytes, for keys and seals.
        fingerprint: Returns the digests that identify the model.
        ranks: The ranks that divide the model; None for none.

    Raises:
        ModelError: The stack has page stores, and the model's adapter does not identify the model.
    """
    if not stores:
        return None

    def origin() -> list[str]:
        texts = [f"{key}: {digest}" for key, digest in sorted(fingerprint().items())]
        rank = [] if ranks is None else [f"rank {ranks.rank} of {ranks.num_ranks}"]
        return [*texts, layout_of(assembly.plan, assembly.setup), *rank]

    if isinstance(ranks, Leader):
        return LeadingPages(ranks, assembly.storage, stores, secret, origin)
    return StoredPages(assembly.storage, stores, secret, origin)


def make_tiers(assembly: Assembly, manager: KVCacheManager, pages: StoredPages | None, secret: bytes) -> Tiers | None:
    """Return the tiers of the cache beside the device; None if the stack has none, or nothing is cached.

    Args:
        assembly: The set-up.
        manager: The cache manager.
        pages: Moves pages from and to page stores; None for no stores.
        secret: 32 bytes, for the keys of pages.
    """
    if not manager.prefix_caching or not (pages or assembly.host):
        return None
    return Tiers(manager, assembly.host, pages, secret)


def make_scheduler(
    assembly: Assembly, manager: KVCacheManager, tiers: Tiers | None, *, proposes: bool = True
) -> Scheduler[RequestT]:
    """Return the scheduler, which gets blocks from the cache manager, and drafts from the stack's proposer if any.

    Args:
        assembly: The set-up.
        manager: The cache manager.
        tiers: Brings prefixes from host memory and page stores; None for none.
        proposes: Whether this process asks the proposer. Of several ranks, rank 0 does.

    Raises:
        StackError: The proposer needs hidden states, and nothing gives it any (``no_hidden_states``).
    """
    limits, drafts = assembly.stack.limits, assembly.stack.model.drafts
    drafting: Drafting[RequestT] | None = None
    if drafts is not None:
        proposer: Proposer = assembly.setup.make_part("proposer", drafts)
        if proposer.needs_hidden_states and not assembly.model.can_give_hidden_states():
            raise StackError(
                f"{assembly.stack.source}: model.drafts: proposer {proposer.name!r} needs hidden states, and the "
                f"model adapter of {assembly.model.description.name} gives none; choose another proposer",
                code="no_hidden_states",
            )
        description = assembly.model.description
        drafting = Drafting(
            proposer, description.vocab_size, assembly.setup.drafts.max_tokens, max_num_seqs=limits.max_num_seqs
        )
        if not proposes:
            drafting.hidden_states = None
    return Scheduler(
        manager,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        shared_block_size=assembly.plan.alignment if manager.prefix_caching else 0,
        whole_prompts=assembly.setup.grouping.whole_prompts,
        reserve_prompts=assembly.stack.engine.reserve_prompts,
        drafting=drafting,
        tiers=tiers,
        policy=assembly.setup.make_part("scheduling", assembly.stack.engine.scheduling),
    )


def attach_models(
    assembly: Assembly,
    warm_up: Callable[[], None],
    *,
    has_ranks: bool,
    with_hidden_states: bool = False,
) -> None:
    """Attach the model and its draft model, compile them, compare each with its own forward, and warm up.

    Prediction heads are not compared: a wrong head changes no token.

    Args:
        assembly: The set-up.
        warm_up: Does the slow work of a first step.
        has_ranks: Whether other ranks have shares of the layers.
        with_hidden_states: Whether the model gives hidden states.

    Raises:
        ModelError: A model cannot be attached or compiled, or attached it computes something else than unattached.
        BackendError: No backend serves a layer in the plain format, or a backend computes a layer wrongly.
        WrapperError: A wrapper changes what a layer computes.
    """
    draft = assembly.draft
    attached: list[LoadedModel] = []
    has_heads = draft is not None and isinstance(draft.model, PredictionHeads)
    try:
        _attach(
            assembly,
            has_ranks=has_ranks,
            with_hidden_states=with_hidden_states or has_heads,
            of_all_tokens=has_heads,
        )
        attached.append(assembly.model)
        if draft is not None and has_heads:
            draft.model.attach(draft.layers)
            attached.append(draft.model)
            if assembly.stack.model.compile:
                draft.model.compile()
        elif draft is not None:
            _attach(draft, has_ranks=False)
            attached.append(draft.model)
        warm_up()
    except BaseException as error:
        for model in attached:
            model.detach()
        refuse_exit(f"{assembly.model.description.name} cannot be attached", error)
        raise


def _attach(
    assembly: Assembly,
    *,
    has_ranks: bool,
    with_hidden_states: bool = False,
    of_all_tokens: bool = False,
) -> None:
    """Attach one model, compile it, and compare it with its own forward, as the stack asks."""
    model, self_check = assembly.model, assembly.stack.engine.self_check
    checked = assemble_plain(assembly) if self_check else assembly

    def prepare() -> None:
        if with_hidden_states:
            model.give_hidden_states(of_all_tokens=of_all_tokens)
        if assembly.stack.model.compile:
            model.compile()

    model.attach(checked.layers)
    try:
        prepare()
        if self_check and not has_ranks:
            check_model(checked)
        elif self_check:
            # No search for the wrong part: the ranks might disagree on what to try, and wait for each other.
            compare(checked)
        if checked is not assembly:
            model.detach()
            model.attach(assembly.layers)
            prepare()
    except BaseException:
        model.detach()
        raise
