"""Bodies and answers of `/tokenize` and `/detokenize`, vLLM's endpoints. No I/O."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Struct

from engine.protocol.params import ModelLimits
from engine.protocol.support import check_supported
from prompts import Tokenizer, bad_value
from prompts.schemas import TokenIdField, decode_json, parse_chat


class TokenizePrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A body of `/tokenize` with a text. A body with `messages` is a chat."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenIdField], msgspec.Meta(max_length=4_000_000)]
    model: str | None = None


class _TokenizeProbe(msgspec.Struct):
    messages: Any = None
    return_token_strs: bool | None = None


class TokenizeResponse(Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(Struct, frozen=True):
    prompt: str


_probe_decoder = msgspec.json.Decoder(_TokenizeProbe)
_prompt_decoder = msgspec.json.Decoder(TokenizePrompt)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def read_tokenize(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[str | None, bytes]:
    """Return (requested model, answer as JSON). Raises RequestError."""
    probe = decode_json(_probe_decoder, data)
    if probe.messages is not None:
        chat = parse_chat(data)
        check_supported(chat)
        model, ids = chat.model, tokenizer.encode_chat(chat)
    else:
        text = decode_json(_prompt_decoder, data)
        model, ids = text.model, tokenizer.encode(text.prompt, text.add_special_tokens)
    strings = [tokenizer.id_to_token(i) or "" for i in ids] if probe.return_token_strs else None
    answer = TokenizeResponse(count=len(ids), max_model_len=limits.max_model_len, tokens=ids, token_strs=strings)
    return model, msgspec.json.encode(answer)


def read_detokenize(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[str | None, bytes]:
    """Return (requested model, answer as JSON). Raises RequestError."""
    body = decode_json(_detokenize_decoder, data)
    for index, token_id in enumerate(body.tokens):
        if token_id >= limits.vocab_size:
            raise bad_value(f"tokens[{index}]", token_id, f"token ids below {limits.vocab_size}")
    return body.model, msgspec.json.encode(DetokenizeResponse(tokenizer.decode(body.tokens, skip_special_tokens=False)))
