"""Chairlift: a self-hosted LLM inference server for small teams."""

from chairlift.errors import ChairliftError

__version__ = "0.1.0"
__all__ = ["ChairliftError", "__version__"]
