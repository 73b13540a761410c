"""A model's thought, apart from its answer: what encloses it, whether an answer begins in it, where it ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.output.detokenizer import DelimiterScanner
from prompts import Tokenizer

ReasoningState = Literal["before", "inside", "after"]
"""Position in a text: reasoning may begin, has begun, or has ended (or never was)."""
SPACES_MAX = 64
"""Most white space before a marker that opens reasoning."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How the models of a family write a thought. It comes first in an answer, and once."""

    name: str
    open_markers: tuple[str, ...]
    close_markers: tuple[str, ...]
    starts_inside: bool = False
    """Answers begin in the thought even where no mark opens it."""
    ends_at_call: bool = False
    """So does the opening of a tool call."""
    template_markers: tuple[str, ...] = ()
    """A chat template that has one of these was made for the format."""


# fmt: off
REASONING_FORMATS = {row.name: row for row in (  # the first that fits a template is chosen
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), ends_at_call=True, template_markers=("[THINK]",)),
    ReasoningFormat("granite", ("Here is my thought process:", "Here's my thought process:"),
                  ("Here is my response:", "Here's my response:"), template_markers=("my thought process",)),
    ReasoningFormat("qwen3", ("<think>",), ("</think>",), ends_at_call=True, template_markers=("<think>",)),
    ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), starts_inside=True, template_markers=("</think>",)),
)}
# fmt: on


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that a chat template was made for; None where it shows no thought."""
    return next(
        (
            format
            for format in REASONING_FORMATS.values()
            if any(marker in template for marker in format.template_markers)
        ),
        None,
    )


def initial_state(format: ReasoningFormat, prompt: str, continued_text: str | None) -> ReasoningState:
    """Return the state at the beginning of an answer.

    `prompt`: at least the end of the prompt; `continued_text`: the message that the answer continues."""
    if continued_text:
        open_position = max(continued_text.rfind(marker) for marker in format.open_markers)
        close_position = max(continued_text.rfind(marker) for marker in format.close_markers)
        return "inside" if open_position > close_position or (format.starts_inside and close_position < 0) else "after"
    end = prompt.rstrip()
    if end.endswith(format.close_markers):
        return "after"
    return "inside" if format.starts_inside or end.endswith(format.open_markers) else "before"


def reasoning_end_token(format: ReasoningFormat, state: ReasoningState, tokenizer: Tokenizer) -> int | None:
    """Return the id of the token that ends the reasoning of an answer that begins in `state`.

    A constraint binds an answer only after this token. None where no reasoning comes, or its end is several tokens.
    """
    if state == "after":
        return None
    return next((i for i in map(tokenizer.token_to_id, format.close_markers) if i is not None), None)


class ReasoningParser:
    """Splits a growing text into the thought and what follows it."""

    def __init__(self, format: ReasoningFormat, state: ReasoningState, call_markers: tuple[str, ...] = ()) -> None:
        """`call_markers`: what opens a tool call."""
        self._open_markers = format.open_markers
        self._call_markers = call_markers if format.ends_at_call else ()
        self._scanner = DelimiterScanner((*format.close_markers, *self._call_markers))
        self._pending_text = ""
        self._may_open = True
        """A mark may still open the thought; inside of one that the prompt has opened it says nothing new."""
        self.has_just_opened = False
        """The last `push` read that mark."""
        self.state = state

    def push(self, piece: str) -> tuple[str, str]:
        """Take the next of the text: (of the thought, of what follows)."""
        self.has_just_opened = False
        if self.state == "after":
            return "", piece
        text, self._pending_text = self._pending_text + piece, ""
        if self._may_open:
            stripped_text = text.lstrip()
            marker = next((marker for marker in self._open_markers if stripped_text.startswith(marker)), None)
            if len(text) - len(stripped_text) > SPACES_MAX:
                marker = None
            elif marker is None and any(marker.startswith(stripped_text) for marker in self._open_markers):
                self._pending_text = text
                return "", ""
            self._may_open = False
            if marker is not None:
                self.state, self.has_just_opened, text = "inside", True, stripped_text[len(marker) :]
            elif self.state == "before":
                self.state = "after"
                return "", text
        match = self._scanner.find_first(text)
        if match is None:
            end = self._scanner.find_partial(text)
            self._pending_text = text[end:]
            return text[:end], ""
        start, marker = match
        self.state = "after"
        return text[:start], text[start if marker in self._call_markers else start + len(marker) :]

    def flush(self) -> tuple[str, str]:
        """Return the (reasoning, text) that was held back, now that nothing follows."""
        pending_text, self._pending_text = self._pending_text, ""
        return (pending_text, "") if self.state == "inside" else ("", pending_text)
