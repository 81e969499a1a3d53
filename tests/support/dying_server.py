"""The command line on the fake model, whose engine thread dies at position DEADLY of any request.

Run by server/test_faults.py as a process of its own: `python -m support.dying_server serve any-name --port N`.
"""

from __future__ import annotations

from unittest.mock import patch

from chairlift import boot, cli
from chairlift.boot import Loaded
from chairlift.kernels.ops import StepArrays
from support.in_process_server import fake_loaded

DEADLY = 200


def die(step: StepArrays) -> None:
    """Ends the calling thread by an exception that nothing catches."""
    if step.positions.max() >= DEADLY:
        raise SystemExit("the engine thread is told to end")


def load(*_: object, **__: object) -> Loaded:
    """Replaces boot.load."""
    return fake_loaded(die)


if __name__ == "__main__":
    with patch.object(boot, "load", load):
        cli.main()
