"""Looks at single streams: what streaming changes, and whether something on the way holds chunks back.

Imports the rooms client and report, and from load its workload.
"""
