"""Puts load on a server and measures its answers. Owns workload, generator, figures, and the doubts about them.

Imports the rooms client and report.
"""
