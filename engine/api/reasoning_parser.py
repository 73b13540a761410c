"""A model's thought, apart from its answer: what encloses it, whether an answer begins in it, where it ends. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.api.detokenizer import DelimiterScanner
from prompts import Tokenizer

ReasoningState = Literal["before", "inside", "after"]
"""Where a text stands: a thought may open, is open, or has ended (or never was)."""
SPACES_MAX = 64
"""White space before a mark that opens a thought."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How the models of a family write a thought. It comes first in an answer, and once."""

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    inside: bool = False
    """Answers begin in the thought even where no mark opens it."""
    calls_end_it: bool = False
    """So does the opening of a tool call."""
    in_template: tuple[str, ...] = ()
    """A chat template that has one of these was made for the format."""


# fmt: off
REASONING_FORMATS = {row.name: row for row in (  # the first that fits a template is chosen
    ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), calls_end_it=True, in_template=("[THINK]",)),
    ReasoningFormat("granite", ("Here is my thought process:", "Here's my thought process:"),
                  ("Here is my response:", "Here's my response:"), in_template=("my thought process",)),
    ReasoningFormat("qwen3", ("<think>",), ("</think>",), calls_end_it=True, in_template=("<think>",)),
    ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), inside=True, in_template=("</think>",)),
)}
# fmt: on


def detect_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format that a chat template was made for; None where it shows no thought."""
    return next((row for row in REASONING_FORMATS.values() if any(mark in template for mark in row.in_template)), None)


def initial_state(row: ReasoningFormat, prompt: str, continued: str | None) -> ReasoningState:
    """Where an answer begins. `prompt`: its end, at least; `continued`: the message that the answer goes on with."""
    if continued:
        opened = max(continued.rfind(mark) for mark in row.opens)
        closed = max(continued.rfind(mark) for mark in row.closes)
        return "inside" if opened > closed or (row.inside and closed < 0) else "after"
    end = prompt.rstrip()
    if end.endswith(row.closes):
        return "after"
    return "inside" if row.inside or end.endswith(row.opens) else "before"


def reasoning_end_token(row: ReasoningFormat, place: ReasoningState, tokenizer: Tokenizer) -> int | None:
    """The token that ends the thought of an answer that begins at `place`, for whom tokens count and not their text:
    what an answer must match binds it only after this token. None where no thought comes, or its end is no one token.
    """
    if place == "after":
        return None
    return next((i for i in map(tokenizer.token_to_id, row.closes) if i is not None), None)


class ReasoningParser:
    """Splits a growing text into the thought and what follows it."""

    def __init__(self, row: ReasoningFormat, place: ReasoningState, call_marks: tuple[str, ...] = ()) -> None:
        """`call_marks`: what opens a tool call."""
        self._opens = row.opens
        self._ends_before = call_marks if row.calls_end_it else ()
        self._marks = DelimiterScanner((*row.closes, *self._ends_before))
        self._left = ""
        self._begins = True
        """A mark may still open the thought; inside of one that the prompt has opened it says nothing new."""
        self.opened = False
        """The last `push` read that mark."""
        self.place = place

    def push(self, piece: str) -> tuple[str, str]:
        """Take the next of the text: (of the thought, of what follows)."""
        self.opened = False
        if self.place == "after":
            return "", piece
        text, self._left = self._left + piece, ""
        if self._begins:
            begun = text.lstrip()
            mark = next((mark for mark in self._opens if begun.startswith(mark)), None)
            if len(text) - len(begun) > SPACES_MAX:
                mark = None
            elif mark is None and any(mark.startswith(begun) for mark in self._opens):
                self._left = text
                return "", ""
            self._begins = False
            if mark is not None:
                self.place, self.opened, text = "inside", True, begun[len(mark) :]
            elif self.place == "before":
                self.place = "after"
                return "", text
        found = self._marks.first(text)
        if found is None:
            end = self._marks.tail(text)
            self._left = text[end:]
            return text[:end], ""
        start, mark = found
        self.place = "after"
        return text[:start], text[start if mark in self._ends_before else start + len(mark) :]

    def release(self) -> tuple[str, str]:
        """What was held back, now that nothing follows."""
        left, self._left = self._left, ""
        return (left, "") if self.place == "inside" else ("", left)
