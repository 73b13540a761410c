"""Which path a client meant that got it wrong."""

from __future__ import annotations

import pytest

from prompts.errors import RequestError
from prompts.unknown_paths import find_nearest_path, make_unknown_path_error

SERVED = [
    "/", "/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions", "/v1/messages",
    "/v1/messages/count_tokens", "/v1/responses", "/v1/responses/*", "/v1/embeddings",
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "expected_path"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/messages/", "/v1/messages"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("//v1//responses/", "/v1/responses"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/api/V1/Completions", "/v1/completions"),
        ("/v1/health", "/health"),
        ("/health/", "/health"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/models", "/v1/models"),
        ("/v1/message", "/v1/messages"),
        ("/nothing", None),
        ("/v1", None),
        ("/", None),
        ("/" + "x" * 300 + "/v1/messages", None),
    ],
)
def test_the_path_that_was_meant(path: str, expected_path: str | None) -> None:
    assert find_nearest_path(path, SERVED) == expected_path


def test_the_error_says_how_the_base_url_ends() -> None:
    def error_message(path: str) -> str:
        error = make_unknown_path_error(path, SERVED)
        assert (error.status, error.code) == (404, "not_found")
        return error.message

    assert "did you mean /v1/chat/completions? The base URL of OpenAI's clients ends with one /v1" in error_message(
        "/chat/completions"
    )
    assert "did you mean /v1/messages? Anthropic's clients add /v1" in error_message("/v1/v1/messages")
    for path in ("/messages", "/anthropic/messages/count_tokens"):  # as clients of DSPy and Vercel send without /v1
        assert error_message(path).endswith("The base URL of this client needs /v1 at its end.")
    assert error_message("/metrics/").endswith("did you mean /metrics?")
    assert "GET / tells" in error_message("/nothing")


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/messages/", "/anthropic/v1/messages/count_tokens"])
def test_a_wrong_path_of_anthropic_s_api_is_refused_in_its_form(path: str) -> None:
    body = RequestError("no", param=None, status=404).body(path)
    assert body == {"type": "error", "error": {"type": "not_found_error", "message": "no"}}
