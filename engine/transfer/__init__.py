"""Cached blocks that move between engines: a server that gives them to peers, and pulls that take them.

The network has a thread of its own. The thread of the steps copies blocks in and out of the cache, between steps.
docs/concepts/moving-kv.md describes it for users.
"""
