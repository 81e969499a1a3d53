"""Measures servers that it starts itself on this machine. Imports the rooms client and report."""
