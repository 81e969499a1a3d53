"""When waiting requests may start: three ways of batching behind one small interface.

`continuous` is how Chairlift serves. `static` and `serial` are how servers without it do. They share the scheduler, so
that the difference can be measured with everything else equal.
"""

from __future__ import annotations

from typing import Literal, Protocol

Batching = Literal["continuous", "static", "serial"]


class Policy(Protocol):
    """The scheduler asks it in every step."""

    @property
    def ends_together(self) -> bool:
        """Whether a request's last event waits until its whole batch has ended."""

    def free_slots(self, num_admitted: int, num_slots: int) -> int:
        """How many waiting requests may start beside `num_admitted` that have begun and not ended."""


class Continuous:
    """A free slot is taken in the next step."""

    ends_together = False

    def free_slots(self, num_admitted: int, num_slots: int) -> int:
        """Every slot that is free."""
        return num_slots - num_admitted


class Static:
    """The requests that wait when a batch has ended become the next batch. No request joins it; it ends as one."""

    ends_together = True

    def free_slots(self, num_admitted: int, num_slots: int) -> int:
        """All slots or none."""
        return 0 if num_admitted else num_slots


class Serial:
    """One request at a time."""

    ends_together = False

    def free_slots(self, num_admitted: int, num_slots: int) -> int:
        """One, when no request runs."""
        return 1 - num_admitted


_POLICIES: dict[Batching, Policy] = {"continuous": Continuous(), "static": Static(), "serial": Serial()}


def policy_for(batching: Batching) -> Policy:
    """The policy of that name."""
    return _POLICIES[batching]
