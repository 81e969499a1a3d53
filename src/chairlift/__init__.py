"""Chairlift: a self-hosted LLM inference server for small teams."""
