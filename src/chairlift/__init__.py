"""Chairlift: a self-hosted LLM inference server for small teams."""

import time

from chairlift.errors import ChairliftError

BEGAN_S = time.perf_counter()
"""When this package was imported: start-up time counts from here."""
__version__ = "0.1.0"
__all__ = ["ChairliftError", "__version__"]
