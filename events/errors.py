"""The error tree of `events`: one root, one class a kind of fault that a caller can act on."""

from __future__ import annotations


class EventsError(Exception):
    """Root of everything this package raises on purpose."""


class DecodeError(EventsError, ValueError):
    """The envelope of an event batch is unreadable; nothing of the payload was used."""


class InvariantError(EventsError, AssertionError):
    """A producer broke one of the guarantees of docs/wire-format.md; the message tells the story of the block."""
