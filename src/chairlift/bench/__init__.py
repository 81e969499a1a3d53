"""Measures any server from outside, over HTTP. Knows neither the engine nor the server, and neither imports it."""
