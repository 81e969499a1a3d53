"""The HTTP server: checks requests, passes token ids to the engine, writes answers. Knows no weights and no kernels."""
