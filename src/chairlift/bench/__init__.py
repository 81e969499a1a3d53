"""Measures servers from outside, over HTTP alone. No part of the server imports this package.

    cli ──> local, streaming ──> load ──> client, report ──> options

A room imports only what stands to its right; client and report do not know each other. A test keeps this true.
"""
