"""Measures servers from outside, over HTTP alone. No part of the server imports this package.

    cli, options ──> local, streaming ──> load ──> client, report

A room imports only what stands to its right; client and report import no other room. A test keeps this true.
"""
