"""Refuse parameters that the engine does not support and that would change the answer."""

from __future__ import annotations

from prompts.chat_completions import ChatRequest, CompletionRequest, Json, is_media
from prompts.errors import bad_value, field_error


def check_supported(request: ChatRequest | CompletionRequest) -> None:
    """Raise RequestError for the first field that the engine does not support."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_value("best_of", request.best_of, f"n ({request.n or 1}): choosing the best is not supported")
    if request.use_beam_search:
        raise bad_value("use_beam_search", True, "false: beam search is not supported")
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(request, name) is not None:
            raise field_error(name, "not supported, expected structured_outputs")
    for name in ("allowed_token_ids", "bad_words", "logits_processors"):
        if getattr(request, name):
            raise field_error(name, "not supported")
    if isinstance(request, ChatRequest):
        for index, message in enumerate(request.messages):
            refuse_media(f"messages[{index}].content", message.get("content"), "text")
        if request.chat_template is not None:  # a template is a program that could run for long
            raise field_error("chat_template", "this server does not take templates from requests")
        return
    if request.suffix:
        raise bad_value("suffix", request.suffix, "no suffix: insertion is not supported")
    if request.prompt_embeds is not None:
        raise field_error("prompt_embeds", "embeddings as prompts are not supported")
    if request.echo and request.stream and request.logprobs is not None and request.n not in (None, 1):
        raise field_error("echo", "not supported together with stream, logprobs and n > 1")


def refuse_media(param: str, content: Json, text_type: str) -> None:
    """Raise RequestError for an image or other media in a content. `text_type`: type of the parts that are texts."""
    for number, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and is_media(part):
            raise bad_value(f"{param}[{number}].type", part.get("type"), f'"{text_type}": this model reads text only')
