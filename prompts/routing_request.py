"""What a body asks for, as routing sees it. Plain, so that compiled code reads its fields at their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from prompts.anthropic import CountRequest
from prompts.responses import ResponsesRequest
from prompts.schemas import Message, Prompt

Kind = Literal["chat", "completion", "messages", "responses", "other"]
FIELDS = (
    "kind", "source", "model", "messages", "prompt", "tools", "documents", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort",
    "truncate_prompt_tokens", "cache_salt", "priority", "stream", "output_max", "output_min", "user",
    "prompt_cache_key", "metadata_user_id", "stored", "scores_prompt", "echoes_chat", "has_media",
)  # fmt: skip


class RoutingRequest:
    """The routing view of a body. Not changed once it is made."""

    __slots__ = FIELDS

    def __init__(
        self,
        kind: Kind,
        source: CountRequest | ResponsesRequest | None = None,
        model: str | None = None,
        messages: list[Message] | None = None,
        prompt: Prompt | None = None,
        tools: list[Message] | None = None,
        documents: list[Message] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        add_special_tokens: bool | None = None,
        reasoning_effort: str | None = None,
        truncate_prompt_tokens: int | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        stream: bool = False,
        output_max: int = 0,
        output_min: int = 0,
        user: str | None = None,
        prompt_cache_key: str | None = None,
        metadata_user_id: str | None = None,
        stored: str | None = None,
        scores_prompt: bool = False,
        echoes_chat: bool = False,
        has_media: bool = False,
    ) -> None:
        self.kind = kind
        self.source = source
        """A body of another API, which is the chat that `chat_of` makes of it; None where the worker will refuse it."""
        self.model = model
        self.messages = messages
        """None where the body has none that could be rendered."""
        self.prompt = prompt
        self.tools = tools
        self.documents = documents
        self.chat_template = chat_template
        self.chat_template_kwargs = chat_template_kwargs
        self.add_generation_prompt = add_generation_prompt
        self.continue_final_message = continue_final_message
        self.add_special_tokens = add_special_tokens
        self.reasoning_effort = reasoning_effort
        self.truncate_prompt_tokens = truncate_prompt_tokens
        self.cache_salt = cache_salt
        self.priority = priority
        self.stream = stream
        self.output_max = output_max
        """Most tokens the client lets all choices have; 0 where it sets no limit."""
        self.output_min = output_min
        """Fewest that all choices will have, by `min_tokens`, or by `ignore_eos` where nothing else ends them."""
        self.user = user
        self.prompt_cache_key = prompt_cache_key
        self.metadata_user_id = metadata_user_id
        """`metadata.user_id`."""
        self.stored = stored
        """Name of the response that it goes on from: the worker that holds it knows the rest of the prompt."""
        self.scores_prompt = scores_prompt
        """Every prompt token gets a logprob: engines then compute the whole prompt and reuse nothing of it."""
        self.echoes_chat = echoes_chat
        """A chat with `echo`: vLLM then scores its prompt too, our engine does not."""
        self.has_media = has_media
        """The prompt holds images or other media: only the text before the first can be routed on."""

    def with_messages(self, messages: list[Message] | None) -> RoutingRequest:
        """The same but for its messages."""
        return RoutingRequest(
            self.kind, self.source, self.model, messages, self.prompt, self.tools, self.documents, self.chat_template,
            self.chat_template_kwargs, self.add_generation_prompt, self.continue_final_message,
            self.add_special_tokens, self.reasoning_effort, self.truncate_prompt_tokens, self.cache_salt,
            self.priority, self.stream, self.output_max, self.output_min, self.user, self.prompt_cache_key,
            self.metadata_user_id, self.stored, self.scores_prompt, self.echoes_chat, self.has_media,
        )  # fmt: skip

    def replaced(self, **changes: Any) -> RoutingRequest:
        """The same but for these fields."""
        return RoutingRequest(**{name: getattr(self, name) for name in FIELDS} | changes)

    def __reduce__(self) -> tuple[Callable[..., RoutingRequest], tuple[object, ...]]:
        return RoutingRequest, tuple([getattr(self, name) for name in FIELDS])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RoutingRequest) and self.__reduce__()[1] == other.__reduce__()[1]

    def __hash__(self) -> int:
        raise TypeError("a RoutingRequest is no key")

    def __repr__(self) -> str:
        return f"RoutingRequest({', '.join(f'{name}={getattr(self, name)!r}' for name in FIELDS)})"
