"""What these scripts share. Each takes the URL of support/talking_server.py, and exits 0 when it is content."""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

URL = sys.argv[1]
TEXT = " Hé🌍, “there”\n"
"""What the server answers, unless the prompt asks for something else."""
E = TypeVar("E", bound=BaseException)


def raised(kind: type[E], call: Callable[[], Any]) -> E:
    """The error of that kind which the call ends in."""
    try:
        call()
    except kind as error:
        return error
    raise SystemExit(f"{kind.__name__} was not raised")
