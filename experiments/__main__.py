"""`python -m experiments`."""

from __future__ import annotations

import sys

from chairlift.bench.report.measure import INTERRUPTED
from chairlift.errors import ChairliftError
from experiments.page import app

if __name__ == "__main__":
    try:
        app()
    except ChairliftError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
