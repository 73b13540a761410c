"""The engine: runs a language model behind an OpenAI-compatible API and publishes what its prefix cache holds.

`engine serve` is the server; `LLM` is the same engine in this process, for offline use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.config import __version__

if TYPE_CHECKING:
    from engine.llm import LLM, CompletionOutput, RequestOutput
    from engine.types import SamplingParams
    from prompts.chat_completions import StructuredOutputs as StructuredOutputsParams

DISTRIBUTION = "blockcast"

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import a public class of this package when it is first used, so that `engine serve --help` loads no PyTorch.

    Python calls this function for names that the module does not define (PEP 562).
    """
    if name == "SamplingParams":
        from engine.types import SamplingParams

        return SamplingParams
    if name == "StructuredOutputsParams":  # the name of this class in vLLM
        from prompts.chat_completions import StructuredOutputs

        return StructuredOutputs
    if name in ("LLM", "CompletionOutput", "RequestOutput"):
        from engine import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
