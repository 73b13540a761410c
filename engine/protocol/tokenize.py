"""Bodies and answers of `/tokenize` and `/detokenize`, vLLM's endpoints. No I/O."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from engine.protocol.params import ModelLimits
from engine.protocol.unsupported_params import check_supported
from prompts import Tokenizer, bad_value, field_error
from prompts.chat_completions import TokenIdField, decode_json, parse_chat


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body of `/tokenize`: a text, or a chat with `messages`, which has all fields of a chat."""

    prompt: str | None = None
    messages: Any = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenIdField], msgspec.Meta(max_length=4_000_000)]
    model: str | None = None


_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


def read_tokenize(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[str | None, bytes]:
    """Return (requested model, answer as JSON). Raises RequestError."""
    body = decode_json(_tokenize_decoder, data)
    if body.messages is not None:
        chat = parse_chat(data)
        check_supported(chat)
        ids = tokenizer.encode_chat(chat)
    elif body.prompt is not None:
        ids = tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    else:
        raise field_error("prompt", "missing or null, expected a text, or messages in its place")
    strings = [tokenizer.id_to_token(i) or "" for i in ids] if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": limits.max_model_len, "tokens": ids, "token_strs": strings}
    return body.model, msgspec.json.encode(answer)


def read_detokenize(data: bytes, tokenizer: Tokenizer, limits: ModelLimits) -> tuple[str | None, bytes]:
    """Return (requested model, answer as JSON). Raises RequestError."""
    body = decode_json(_detokenize_decoder, data)
    for index, token_id in enumerate(body.tokens):
        if token_id >= limits.vocab_size:
            raise bad_value(f"tokens[{index}]", token_id, f"token ids below {limits.vocab_size}")
    text = tokenizer.decode(body.tokens, skip_special_tokens=False)
    return body.model, msgspec.json.encode({"prompt": text})
