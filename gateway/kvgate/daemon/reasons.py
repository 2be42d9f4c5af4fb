"""Why a lookup missed: what was asked for beside what is stored of the same prompt. Pure: the index is asked through ``Known``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvgate.contract.access import ORDINARY
from kvgate.contract.digests import DIGEST_BYTES
from kvgate.contract.table import COMPONENTS
from kvgate.daemon.links import Links
from kvgate.storage.envelope import Components

_FIELDS: Final = {name: name.replace(" ", "_") for name in COMPONENTS if name != "scope"}
_NONE: Final = bytes(DIGEST_BYTES)
"""An explicit "none" (no adapter). No digest is all zeros: the contract refuses that."""
_SHORT_BYTES: Final = 8
ORDINARY_PART: Final = ORDINARY.digest()
SET_BYTES: Final = len(_FIELDS) * DIGEST_BYTES
VARIANT_AT: Final = list(_FIELDS).index("variant") * DIGEST_BYTES
"""Where in ``Make.parts`` the variant is; ``ORDINARY_PART`` is what stands there for ordinary KV."""
ACCESS_BYTES: Final = 16
"""Half of a digest: a collision would give one miss a wrong name, nothing more."""


@dataclass(frozen=True, slots=True)
class Make:
    """What an object is made of: ``parts``, the digests of all components but access, in the table's order, and its ``access``."""

    parts: bytes
    access: bytes

    @classmethod
    def of(cls, components: Components) -> Make:
        """The same components in the index's form."""
        digests = [getattr(components, field) or _NONE for field in _FIELDS.values()]
        return cls(b"".join(digests), components.access[:ACCESS_BYTES])

    @classmethod
    def on(cls, shelf: bytes, parts: bytes) -> Make:
        """What the index keeps on ``shelf``."""
        return cls(parts, shelf if _is_ordinary(parts) else _other_side(shelf))

    @property
    def shelf(self) -> bytes:
        """Under what the index keeps it: ordinary KV and transformed artifacts of one access lie apart.

        So a lookup of either kind is answered from its own kind alone: that somebody has published a variant of these tokens can't
        be told from what an ordinary lookup is told, nor from how long that takes.
        """
        return self.access if _is_ordinary(self.parts) else _other_side(self.access)

    def differing(self, other: Make) -> tuple[str, ...]:
        """Names of the components in which both differ, in the table's order."""
        mine, theirs = self._digests(), other._digests()
        return tuple(name for name in COMPONENTS if mine[name] != theirs[name])

    def distance(self, other: Make) -> int:
        """In how many components both differ. Quicker than naming them: it is asked of everything stored of a prompt."""
        mine, theirs = self.parts, other.parts
        steps = range(0, SET_BYTES, DIGEST_BYTES)
        differing = sum(mine[at : at + DIGEST_BYTES] != theirs[at : at + DIGEST_BYTES] for at in steps)
        return differing + (self.access != other.access)

    def short(self) -> dict[str, str]:
        """Component name → 16 hexadecimal digits, or "none": enough to tell two apart, of no other use."""
        return {name: digest[:_SHORT_BYTES].hex() if any(digest) else "none" for name, digest in self._digests().items()}

    def _digests(self) -> dict[str, bytes]:
        found = {name: self.parts[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES] for at, name in enumerate(_FIELDS)} | {
            "scope": self.access
        }
        return {name: found[name] for name in COMPONENTS}


def _is_ordinary(parts: bytes) -> bool:
    return parts[VARIANT_AT : VARIANT_AT + DIGEST_BYTES] == ORDINARY_PART


def _other_side(access: bytes) -> bytes:
    return bytes(byte ^ 0xFF for byte in access)


class Known(Protocol):
    """What the index can be asked. ``access``: a shelf of it (``Make.shelf``); None: objects of any access of the domain."""

    def holds(self, link: bytes, make: Make) -> bool:
        """Whether exactly this was stored under ``link`` once."""

    def run(self, links: Sequence[bytes], access: bytes | None) -> int:
        """How many of ``links``, from the first on without a gap, anything is known under."""

    def makes(self, link: bytes, access: bytes | None) -> list[Make]:
        """What was stored under ``link``, the newest first."""


@dataclass(frozen=True, slots=True)
class Question:
    """A miss of chunk ``missing`` of a request. ``refused``: why that chunk was quarantined, "" if it was not.

    ``answered`` False: storage did not answer, so whether the object is there is not known.
    """

    chain: Links
    missing: int
    make: Make
    refused: str = ""
    answered: bool = True

    def links(self) -> list[bytes]:
        """Links of the bound chunks from the first missing one on. Hashes them at the first call: not for the event loop."""
        return self.chain.first(len(self.chain))[self.missing :]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reasons`` as the protocol names them; ``known``: missing chunks of which something is stored; ``nearest``: what."""

    reasons: tuple[str, ...]
    known: int = 0
    nearest: Make | None = None


UNEXPLAINED: Final = Verdict(("unexplained",))


def judge(known: Known, question: Question, access: bytes | None) -> Verdict:
    """Why it missed, as told to somebody who may know of objects on the shelf ``access`` only (None: of the whole domain).

    Everything that is not on it is left out before anything else is looked at: it can change neither the answer nor the
    work done for it.
    """
    links = question.links()
    if not links:
        return Verdict(("below one chunk",))
    if question.refused:
        return Verdict((f"refused:{question.refused}",))
    if not question.answered:
        return Verdict(("unavailable",))
    if known.holds(links[0], question.make):
        return Verdict(("evicted",), 1, question.make)
    run = known.run(links, access)
    link = links[max(run, 1) - 1]
    makes = known.makes(link, access)
    if access is None:
        # What the requester may have comes first, so that of two equally near objects it is the one that is named.
        makes = known.makes(link, question.make.shelf) + makes
    # Where nothing is known the same is asked and compared all the same, with itself: this thread's work delays the requester's next
    # answers, and the operator's verdict may look at what the requester must not learn of.
    nearest = min(makes or [question.make], key=question.make.distance)
    differing = question.make.differing(nearest)
    return Verdict(differing or ("evicted",), run, nearest) if run else Verdict(("absent",))
