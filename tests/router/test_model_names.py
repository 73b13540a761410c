"""Which model a name stands for where aliases are patterns."""

from __future__ import annotations

import pytest

from options import ConfigError, load_config
from router.app.config import SCHEMA
from router.tenancy.config import TenancyConfig
from router.tenancy.model_names import ModelNames

SERVED = {"llama", "qwen", "claude-local"}


def resolve(requested_name: str, *aliases: str, served_models: set[str] = SERVED) -> str:
    names = ModelNames(TenancyConfig(model_aliases=aliases))
    assert names.has_renames
    return names.resolve(requested_name, lambda: "conversation", served_models.__contains__)


@pytest.mark.parametrize(
    ("requested_name", "model"),
    [
        ("claude-opus-4-8", "llama"),
        ("claude-", "llama"),
        ("claude-haiku-4-5", "qwen"),
        ("claude-haiku-", "qwen"),
        ("claude-local", "claude-local"),
        ("claude-exact", "qwen"),
        ("gpt-5-mini", "qwen"),
        ("gpt-mini", "gpt-mini"),
        ("other", "other"),
        ("", ""),
    ],
)
def test_the_exact_name_then_whoever_serves_it_then_the_longest_pattern(requested_name: str, model: str) -> None:
    aliases = "claude-*=llama", "claude-haiku-*=qwen", "claude-exact=qwen", "gpt-*-mini=qwen"
    assert resolve(requested_name, *aliases) == model
    assert resolve(requested_name, *reversed(aliases)) == model


def test_a_star_alone_takes_every_name_that_nobody_serves() -> None:
    assert resolve("anything", "*=llama") == "llama"
    assert resolve("qwen", "*=llama") == "qwen"


def test_beginning_and_end_of_a_pattern_do_not_share_letters() -> None:
    assert resolve("aba", "ab*ba=llama") == "aba"
    assert resolve("abba", "ab*ba=llama") == "llama"


def test_a_pattern_is_listed_nowhere() -> None:
    names = ModelNames(TenancyConfig(model_aliases=("claude-*=llama", "gpt=llama")))
    assert names.model_by_alias == {"gpt": "llama"}


@pytest.mark.parametrize("alias", ["a*b*=m", "**=m", "=m", "a=m*", "a*", "a*="])
def test_a_pattern_has_one_star_and_stands_for_one_model(alias: str) -> None:
    with pytest.raises(ConfigError, match=r"--model-alias: got .*claude-\*="):
        load_config(SCHEMA, flags={"model_aliases": (alias,)})
