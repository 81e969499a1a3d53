"""Ops that models are written in, and the ways of computing them."""
