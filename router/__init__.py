# A package of the distribution blockcast: options/entry.py looks for this line.
"""The router: follows what workers hold, and sends each request to the one that will answer it first."""
