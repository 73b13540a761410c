"""Settings of model names. Those of fair shares and the background belong to the queue: router/decide/config.py."""

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
    """Aliases, fallbacks and canaries of models; docs/how-to/share-between-tenants.md explains them."""

    model_aliases: Annotated[tuple[AliasRule, ...], Flag("--model-alias", metavar="NAME=MODEL"),
        "Serve requests for NAME by MODEL; one * in NAME stands for any text.",
        "A NAME with * counts only for names that no worker serves."] = ()
    model_fallbacks: Annotated[tuple[FallbackRule, ...], Flag("--model-fallback", metavar="MODEL=OTHER"),
        "Serve requests for MODEL by OTHER while no worker of MODEL is up."] = ()
    model_canaries: Annotated[tuple[CanaryRule, ...], Flag("--model-canary", metavar="MODEL=NEW:SHARE"),
        "Serve this share of the conversations with MODEL by NEW, each as a whole."] = ()

    def __post_init__(self) -> None:
        for flag, rules in (("--model-alias", self.model_aliases), ("--model-fallback", self.model_fallbacks)):
            names = [rule.partition("=")[0] for rule in rules]
            duplicate_name = next((name for name in names if names.count(name) > 1), None)
            if duplicate_name is not None:
                raise ConfigError(f"{flag}: {duplicate_name} is given twice")
        model_by_alias, fallback_by_model = parse_rules(self.model_aliases), parse_rules(self.model_fallbacks)
        for name, model in model_by_alias.items():
            if model in model_by_alias:
                raise ConfigError(f"--model-alias: {name} is {model}, which is an alias itself")
        for first_model in fallback_by_model:
            chain, name = [first_model], first_model
            while (name := fallback_by_model.get(name, "")) and name not in chain:
                chain.append(name)
            if name:
                raise ConfigError(f"--model-fallback: a circle: {' -> '.join([*chain, name])}")
        for model, canaries in parse_canaries(self.model_canaries).items():
            if sum(share for _, share in canaries) > 1.0:
                raise ConfigError(f"--model-canary: the shares of {model} are more than 1 together")


def parse_rules(rules: tuple[str, ...]) -> dict[str, str]:
    """Parse rules NAME=MODEL into a model by name."""
    return {name: model for name, _, model in (rule.partition("=") for rule in rules)}


def parse_canaries(rules: tuple[str, ...]) -> dict[str, list[tuple[str, float]]]:
    """Parse rules MODEL=NEW:SHARE into (new model, share) pairs by model, in their order."""
    canaries_by_model: dict[str, list[tuple[str, float]]] = {}
    for rule in rules:
        model, _, canary_and_share = rule.partition("=")
        canary, _, share = canary_and_share.rpartition(":")
        canaries_by_model.setdefault(model, []).append((canary, float(share)))
    return canaries_by_model
