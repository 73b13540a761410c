"""From request bodies to token ids: schemas, chat templates, tokenizing.

The same code runs in the engine and in the router, so that both always get equal ids. Imports only the room `options`,
and needs no torch. Start at `parse_chat` / `parse_completion` / `parse_routing` and `Tokenizer`.
"""

from prompts.chat_completions import ChatRequest, CompletionRequest, parse_chat, parse_completion
from prompts.chat_template import ChatTemplate, ChatTemplateError
from prompts.errors import RequestError, bad_value, field_error
from prompts.routing import RoutingRequest, parse_routing
from prompts.tokenizer import Tokenizer, TokenizerError

DISTRIBUTION = "blockcast"

__all__ = [
    "ChatRequest",
    "ChatTemplate",
    "ChatTemplateError",
    "CompletionRequest",
    "RequestError",
    "RoutingRequest",
    "Tokenizer",
    "TokenizerError",
    "bad_value",
    "field_error",
    "parse_chat",
    "parse_completion",
    "parse_routing",
]
