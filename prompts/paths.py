"""Paths that clients get wrong: which served path was meant, and the error that says so. Both programs use it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from prompts.errors import RequestError

_PATH_CHARS_MAX = 100
"""Longer paths are compared with nothing: comparing costs time."""


def find_nearest_path(path: str, served_paths: Iterable[str]) -> str | None:
    """Return the path among `served_paths` that a client probably meant: one that `path` ends with, whatever stands
    before it (`/chat/completions`, `/v1/v1/messages`, `/v1/messages/`), else one that is spelled nearly so."""
    if len(path) > _PATH_CHARS_MAX:
        return None
    segments = _split_path(path)
    routes = [route for route in served_paths if route != path and _split_path(route) and "*" not in route]
    for route in sorted(routes, key=len, reverse=True):
        route_segments = _split_path(route)
        if segments[-len(route_segments) :] == route_segments:
            return route
    close_matches = difflib.get_close_matches("/v1/" + "/".join(segments), [*routes], 1, cutoff=0.85)
    return close_matches[0] if close_matches else None


def make_unknown_path_error(
    path: str, served_paths: Iterable[str], *, reason: str = "there is no such path"
) -> RequestError:
    """Return the 404 for a path that nobody serves, with the one that was meant. `reason`: said where none is near."""
    suggestion = find_nearest_path(path, served_paths)
    if suggestion is None:
        message = f"{path[:200]}: {reason} (GET / tells what is served here)"
    else:
        message = f"{path[:200]}: there is no such path, did you mean {suggestion}?"
        if suggestion.startswith("/v1/messages"):
            message += " Anthropic's clients add /v1 to their base URL themselves."
        elif suggestion.startswith("/v1/"):
            message += " The base URL of OpenAI's clients ends with one /v1."
    return RequestError(message, param=None, code="not_found", status=404)


def _split_path(path: str) -> list[str]:
    """The segments of a path, without the version and in lower case."""
    return [word for word in path.lower().split("/") if word not in ("", "v1")]
