"""What a measurement says and how it is shown: tables, charts, statistics of plain numbers, progress.

Knows neither servers nor requests, and imports no other room of the bench.
"""
