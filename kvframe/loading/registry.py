"""The registry: which class a registered name stands for, and which plugin owns the name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kvframe.contract.errors import ContestedNameError, PluginError, UnknownNameError, listed
from kvframe.loading.claims import BUILTIN_OWNER, KINDS, Claim, canonical
from kvframe.loading.packages import provider_of, to_install


class Catalogue:
    """The names of one kind.

    A name belongs to the only plugin that claims it. If several plugins claim it, it belongs to the one that the stack
    chose, or to none.
    """

    def __init__(self, kind: str, owner_choices: Mapping[str, str], set_aside: Sequence[str] = ()) -> None:
        """Start empty.

        Args:
            kind: The kind's key in ``KINDS``.
            owner_choices: The distribution that the stack chose, by contested name.
            set_aside: Sentences about unused plugins, for errors about unknown names. Kept by reference, not copied.
        """
        self.kind = kind
        self.label = KINDS[kind].label
        self.owner_choices = dict(owner_choices)
        self._set_aside = set_aside
        self._claims: dict[str, list[Claim]] = {}

    def __contains__(self, name: object) -> bool:
        """Return whether ``get`` finds ``name``."""
        try:
            self.get(str(name))
        except (UnknownNameError, ContestedNameError):
            return False
        return True

    def names(self) -> tuple[str, ...]:
        """Return the names that have one owner, sorted; contested names are not among them."""
        return tuple(name for name in sorted(self._claims) if name in self)

    def contested(self) -> Mapping[str, tuple[str, ...]]:
        """Return the plugins that claim each contested name."""
        return {
            name: tuple(claim.owner for claim in claims)
            for name, claims in sorted(self._claims.items())
            if name not in self
        }

    def claims(self, name: str | None = None) -> tuple[Claim, ...]:
        """Return every claim to ``name``, or to any name, contested or not."""
        names = sorted(self._claims) if name is None else [name]
        return tuple(claim for claimed_name in names for claim in self._claims.get(claimed_name, ()))

    def add(self, claim: Claim) -> None:
        """Record a claim.

        Raises:
            ContestedNameError: The name is built in.
            PluginError: Another plugin of the same distribution claims it already.
        """
        claims = self._claims.get(claim.name, [])
        for other_claim in claims:
            if other_claim.owner == BUILTIN_OWNER:
                raise ContestedNameError(
                    f"{self.label} {claim.name!r} is built in and cannot be claimed; register another name"
                )
            if other_claim.owner == claim.owner:
                raise PluginError(f"{self.label} {claim.name!r} is registered already, by {other_claim.plugin}")
        self._claims[claim.name] = sorted([*claims, claim], key=lambda claim_of_name: claim_of_name.owner)

    def get(self, name: str) -> Claim:
        """Return the claim that a registered name, or ``distribution:name``, stands for. Imports nothing.

        Raises:
            UnknownNameError: No plugin claims it.
            ContestedNameError: Several plugins claim it, and the stack names no owner, or an owner without a claim.
        """
        owner, separator, bare = name.rpartition(":")
        claims = self._claims.get(bare, [])
        if separator:
            claims = [claim for claim in claims if canonical(claim.owner) == canonical(owner)]
        if not claims:
            known_names = (claim.id for claim in self.claims()) if separator else self._claims
            hint = f"plugins set aside: {listed(self._set_aside)}" if self._set_aside else ""
            provider = provider_of(self.kind, name)
            if provider is not None and not any(sentence.startswith(f"{provider}:") for sentence in self._set_aside):
                hint = "; ".join(filter(None, [f"`{to_install(provider)}` provides it", hint]))
            raise UnknownNameError(self.label, name, known_names, hint)
        if separator:
            return claims[0]
        choice = self.owner_choices.get(name)
        if choice is not None:
            for claim in claims:
                if canonical(claim.owner) == canonical(choice):
                    return claim
            raise ContestedNameError(
                f"the stack gives {self.label} {name!r} to {choice!r}, which does not provide it; "
                f"provided by: {', '.join(claim.owner for claim in claims)}"
            )
        if len(claims) > 1:
            owners = [claim.owner for claim in claims]
            raise ContestedNameError(
                f"{self.label} {name!r} is claimed by {' and '.join(owners)}, so it belongs to none; choose with "
                f'[plugins.owners.{self.kind}] {name} = "{owners[0]}" in the stack, or write "{claims[0].id}"'
            )
        return claims[0]

    def load(self, name: str) -> Any:
        """Import and return the class that ``name`` stands for; raises as ``get`` and ``Claim.load`` do."""
        return self.get(name).load()


class Registry:
    """The catalogues of all kinds. Loading plugins fills them; later code only reads them.

    Attributes:
        catalogues: By kind.
        versions: By distribution, the version of each loaded plugin; empty if it is unknown.
    """

    def __init__(self, owners: Mapping[str, Mapping[str, str]] = MappingProxyType({})) -> None:
        """Start empty, with the stack's choices for contested names: kind, name, distribution."""
        self._set_aside: list[str] = []
        self.versions: dict[str, str] = {}
        self.catalogues: Mapping[str, Catalogue] = {
            kind: Catalogue(kind, owners.get(kind, {}), self._set_aside) for kind in KINDS
        }
        self.specs = self.catalogues["spec"]
        self.wrappers = self.catalogues["wrapper"]
        self.backends = self.catalogues["backend"]
        self.formats = self.catalogues["format"]
        self.eviction_policies = self.catalogues["eviction"]
        self.page_stores = self.catalogues["page_store"]
        self.event_publishers = self.catalogues["event_publisher"]
        self.scheduling_policies = self.catalogues["scheduling"]
        self.proposers = self.catalogues["proposer"]
        self.logits_processors = self.catalogues["logits_processor"]
        self.model_adapters = self.catalogues["model_adapter"]

    def add(self, claims: Sequence[Claim]) -> None:
        """Record all claims of one plugin; if ``Catalogue.add`` raises for one of them, record none."""
        claims_of_kinds = {kind: dict(catalogue._claims) for kind, catalogue in self.catalogues.items()}
        try:
            for claim in claims:
                self.catalogues[claim.kind].add(claim)
        except (ContestedNameError, PluginError):
            for kind, claims_before in claims_of_kinds.items():
                self.catalogues[kind]._claims = claims_before
            raise

    def claims(self, name: str | None = None) -> list[Claim]:
        """Return every claim of every kind to ``name``, or to any name."""
        return [claim for catalogue in self.catalogues.values() for claim in catalogue.claims(name)]

    def note_set_aside(self, sentence: str) -> None:
        """Record why a plugin is not in use, for errors about the names that it would have registered."""
        self._set_aside.append(sentence)
