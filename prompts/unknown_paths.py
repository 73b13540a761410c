"""Errors for unknown paths, which suggest the path that a client probably meant. For both programs."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from prompts.errors import RequestError

_PATH_CHARS_MAX = 100
"""Longest path for which a suggestion is searched, as comparing takes time."""
_SIMILARITY_MIN = 0.85
"""Similarity (difflib's ratio) from which on a misspelt path is near to another."""


def find_nearest_path(path: str, served_paths: Iterable[str]) -> str | None:
    """Return the served path that a client probably meant by an unknown path; None if no path is near.

    A client may have forgotten or doubled `/v1`, or added something before the path. Else the nearest spelling counts.
    """
    if len(path) > _PATH_CHARS_MAX:
        return None
    segments = _split_path(path)
    candidates = [served for served in served_paths if served != path and _split_path(served) and "*" not in served]
    for candidate in sorted(candidates, key=len, reverse=True):
        candidate_segments = _split_path(candidate)
        if segments[-len(candidate_segments) :] == candidate_segments:
            return candidate
    path_with_version = "/v1/" + "/".join(segments)
    close_matches = difflib.get_close_matches(path_with_version, candidates, n=1, cutoff=_SIMILARITY_MIN)
    return close_matches[0] if close_matches else None


def make_unknown_path_error(
    path: str, served_paths: Iterable[str], *, reason: str = "there is no such path"
) -> RequestError:
    """Return the error 404 for an unknown path, with a suggestion, or with `reason` if no path is near."""
    suggestion = find_nearest_path(path, served_paths)
    if suggestion is None:
        message = f"{path[:200]}: {reason} (GET / tells what is served here)"
    else:
        message = f"{path[:200]}: there is no such path, did you mean {suggestion}?"
        if suggestion.startswith("/v1/messages") and "/v1/" not in path.lower():
            message += " The base URL of this client needs /v1 at its end."
        elif suggestion.startswith("/v1/messages"):
            message += " Anthropic's clients add /v1 to their base URL themselves."
        elif suggestion.startswith("/v1/"):
            message += " The base URL of OpenAI's clients ends with one /v1."
    return RequestError(message, code="not_found", status=404)


def _split_path(path: str) -> list[str]:
    """Split a path into lower-case segments without the version."""
    return [word for word in path.lower().split("/") if word not in ("", "v1")]
