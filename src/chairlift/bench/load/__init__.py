"""Puts load on a server and says what became of it: workload, generator, figures, and what makes the figures doubtful.

Imports the rooms client and report.
"""
