"""Turns of conversations: what was asked before, and why a cache did not help. Pure."""
