"""Settings of model names. Settings of fair shares and background requests are in router/decide/config.py."""

from __future__ import annotations

from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
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
    """Rules by which requests for one model name are served by another: aliases, fallbacks and canaries."""

    model_aliases: Annotated[tuple[AliasRule, ...], Flag("--model-alias", metavar="NAME=MODEL"),
        "Serve requests for NAME by MODEL; one * in NAME stands for any text.",
        "A NAME with * counts only for names that no worker serves."] = ()
    model_fallbacks: Annotated[tuple[FallbackRule, ...], Flag("--model-fallback", metavar="MODEL=OTHER"),
        "Serve requests for MODEL by OTHER while no worker of MODEL is up."] = ()
    model_canaries: Annotated[tuple[CanaryRule, ...], Flag("--model-canary", metavar="MODEL=NEW:SHARE"),
        "Serve this share of the conversations with MODEL by NEW, each as a whole."] = ()

    def __post_init__(self) -> None:
        """Check that the rules fit together. Raises ConfigError."""
        _check_duplicates("--model-alias", self.model_aliases)
        _check_duplicates("--model-fallback", self.model_fallbacks)
        model_by_alias = parse_rules(self.model_aliases)
        for name, model in model_by_alias.items():
            if model in model_by_alias:
                raise ConfigError(f"--model-alias: {name} is {model}, which is an alias itself")
        _check_fallbacks(parse_rules(self.model_fallbacks))
        for model, canaries in parse_canaries(self.model_canaries).items():
            if sum(share for _, share in canaries) > 1.0:
                raise ConfigError(f"--model-canary: the shares of {model} add up to more than 1")


def _check_duplicates(flag: str, rules: tuple[str, ...]) -> None:
    """Raise ConfigError if two rules NAME=MODEL have the same name."""
    names = [rule.partition("=")[0] for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{flag}: {name} is given twice")


def _check_fallbacks(fallback_by_model: dict[str, str]) -> None:
    """Raise ConfigError if the fallbacks of a model lead back to one of its models."""
    try:
        TopologicalSorter({model: [fallback] for model, fallback in fallback_by_model.items()}).prepare()
    except CycleError as error:
        raise ConfigError(f"--model-fallback: a circle: {' -> '.join(reversed(error.args[1]))}") from None


def parse_rules(rules: tuple[str, ...]) -> dict[str, str]:
    """Parse rules NAME=MODEL, and return the model of each name."""
    return {name: model for name, _, model in (rule.partition("=") for rule in rules)}


def parse_canaries(rules: tuple[str, ...]) -> dict[str, list[tuple[str, float]]]:
    """Parse rules MODEL=NEW:SHARE, and return the (new model, share) pairs of each model in the rules' order."""
    canaries_by_model: dict[str, list[tuple[str, float]]] = {}
    for rule in rules:
        model, _, canary_and_share = rule.partition("=")
        canary, _, share = canary_and_share.rpartition(":")
        canaries_by_model.setdefault(model, []).append((canary, float(share)))
    return canaries_by_model
