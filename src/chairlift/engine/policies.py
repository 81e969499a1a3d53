"""How many may join, and when: the three ways of batching, behind one small interface.

`continuous` is how Chairlift serves. `static` and `serial` are how servers without it do, kept so that the difference
can be measured with everything else equal.
"""

from __future__ import annotations

from typing import Protocol

from chairlift.plan import Batching


class Policy(Protocol):
    """Asked once a step."""

    @property
    def holds_finals(self) -> bool:
        """Whether a request's last event waits until its whole batch has ended."""

    def seats(self, num_members: int, num_slots: int) -> int:
        """How many new requests may join `num_members` that have begun and not ended (preempted ones among them)."""


class Continuous:
    """A free slot is taken in the next step."""

    holds_finals = False

    def seats(self, num_members: int, num_slots: int) -> int:
        """Every slot that is free."""
        return num_slots - num_members


class Static:
    """Whoever waits when the last batch has ended becomes the next; nobody joins it, and it ends as one."""

    holds_finals = True

    def seats(self, num_members: int, num_slots: int) -> int:
        """All slots or none."""
        return 0 if num_members else num_slots


class Serial:
    """One request at a time."""

    holds_finals = False

    def seats(self, num_members: int, num_slots: int) -> int:
        """One, when nobody is served."""
        return 1 - num_members


_POLICIES: dict[Batching, Policy] = {"continuous": Continuous(), "static": Static(), "serial": Serial()}


def policy_for(batching: Batching) -> Policy:
    """The policy of that name."""
    return _POLICIES[batching]
