"""What tenancy can be told. Turns, the background and --max-ttft are the queue's: router/decide/config.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from options import ConfigError, Flag

FallbackRule = Annotated[str, Meta(pattern=r"^[^=]+=[^=]+$", title="NAME=MODEL", examples=["gpt-4=llama-70b"])]
AliasRule = Annotated[
    str,
    Meta(
        pattern=r"^([^=*]+|[^=*]*\*[^=*]*)=[^=*]+$",
        title="NAME=MODEL",
        examples=["gpt-4=llama-70b", "claude-*=llama-70b"],
    ),
]
CanaryRule = Annotated[
    str, Meta(pattern=r"^[^=]+=[^=]+:(0(\.\d+)?|1(\.0+)?|\.\d+)$", title="MODEL=NEW:SHARE", examples=["m=m-v2:0.05"])
]


# fmt: off
@dataclass(frozen=True, slots=True)
class TenancyConfig:
    """docs/sharing.md."""

    model_aliases: Annotated[tuple[AliasRule, ...], Flag("--model-alias", metavar="NAME=MODEL"),
        "Serve requests for NAME by MODEL; one * in NAME stands for any text.",
        "A NAME with * counts only for names that no worker serves."] = ()
    model_fallbacks: Annotated[tuple[FallbackRule, ...], Flag("--model-fallback", metavar="MODEL=OTHER"),
        "Serve requests for MODEL by OTHER while no worker of MODEL is up."] = ()
    model_canaries: Annotated[tuple[CanaryRule, ...], Flag("--model-canary", metavar="MODEL=NEW:SHARE"),
        "Serve this share of the conversations with MODEL by NEW, each as a whole."] = ()

    def __post_init__(self) -> None:
        for flag, texts in (("--model-alias", self.model_aliases), ("--model-fallback", self.model_fallbacks)):
            names = [text.partition("=")[0] for text in texts]
            duplicate = next((name for name in names if names.count(name) > 1), None)
            if duplicate is not None:
                raise ConfigError(f"{flag}: {duplicate} is given twice")
        aliases, fallbacks = parse_pairs(self.model_aliases), parse_pairs(self.model_fallbacks)
        for name, model in aliases.items():
            if model in aliases:
                raise ConfigError(f"--model-alias: {name} is {model}, which is an alias itself")
        for start in fallbacks:
            chain, name = [start], start
            while (name := fallbacks.get(name, "")) and name not in chain:
                chain.append(name)
            if name:
                raise ConfigError(f"--model-fallback: a circle: {' -> '.join([*chain, name])}")
        for model, canaries in parse_canaries(self.model_canaries).items():
            if sum(share for _, share in canaries) > 1.0:
                raise ConfigError(f"--model-canary: the shares of {model} are more than 1 together")


def parse_pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """NAME=MODEL each."""
    return {name: model for name, _, model in (text.partition("=") for text in texts)}


def parse_canaries(texts: tuple[str, ...]) -> dict[str, list[tuple[str, float]]]:
    """MODEL=NEW:SHARE each; in their order."""
    canaries: dict[str, list[tuple[str, float]]] = {}
    for text in texts:
        model, _, rule = text.partition("=")
        canary, _, share = rule.rpartition(":")
        canaries.setdefault(model, []).append((canary, float(share)))
    return canaries
