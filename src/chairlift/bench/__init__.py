"""Measuring servers from outside, over HTTP alone. Nothing of the server imports this package."""
