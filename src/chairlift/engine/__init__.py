"""Turns requests into steps of the model, and sampled tokens into text. Knows neither HTTP nor JSON nor asyncio."""
