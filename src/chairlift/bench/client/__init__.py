"""Asks servers over HTTP and records what arrived when. Imports no other room of the bench."""
