"""Single values: sizes with units, words for what is expected, odd numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta, MsgspecError

from options.command import NumberType
from options.values import (
    ConfigError,
    Size,
    UntypedText,
    convert_value,
    describe_type,
    parse_size,
    parse_text,
    read_value,
)

Port = Annotated[int, Meta(ge=0, le=65535)]


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("4096", 4096), ("4GB", 4 * 10**9), ("4GiB", 4 << 30), ("4 GiB", 4 << 30), ("4g", 4 * 10**9), ("4G", 4 << 30),
        ("1.5k", 1500), ("0.5MiB", 1 << 19), ("10b", 10), ("2T", 2 << 40), ("64mb", 64 * 10**6), ("0", 0), ("1.5B", 2),
    ],
)  # fmt: skip
def test_sizes(text: str, bytes_: int) -> None:
    assert parse_size(text, 1) == bytes_


@pytest.mark.parametrize("text", ["", "GB", "4X", "-4GB", "4.5", "1e9", "4GBB", "4 G B", "٤GB", "0x10", "4,5GB", "nan"])
def test_no_sizes(text: str) -> None:
    assert parse_size(text, 1) is None


def test_a_plain_number_counts_the_setting_s_own_unit() -> None:
    assert parse_size("64", 1 << 20) == 64
    assert parse_size("1GiB", 1 << 20) == 1024
    assert parse_size("1kB", 1 << 20) == 1  # rounded up: not "none"


@given(number=st.integers(0, 10**6), unit=st.sampled_from(["", "b", "k", "K", "MB", "MiB", "g", "G"]))
def test_sizes_grow_with_their_number(number: int, unit: str) -> None:
    size, larger_size = parse_size(f"{number}{unit}", 1), parse_size(f"{number + 1}{unit}", 1)
    assert size is not None
    assert larger_size is not None
    assert size < larger_size


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("8080", Port, 8080),
        ("true", bool, True),
        ("0", bool, False),
        ("a b", tuple[str, ...], ("a", "b")),
        ('["a b"]', tuple[str, ...], ("a b",)),
        ("[1, 2.5]", tuple[float, float], (1.0, 2.5)),
        ("1 2.5", tuple[float, float], (1.0, 2.5)),
        ("12", str, "12"),
        ("auto", Literal["auto", "cpu"], "auto"),
        ("2k", Annotated[int, Size()], 2000),
    ],
)
def test_text_is_read_by_its_type(text: str, kind: Any, value: Any) -> None:
    assert parse_text(text, kind) == value


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("", Port), ("8_0", Port), ("1.5", Port), ("65536", Port), ("yes", bool), ("inf", float), ("-inf", float),
        ("nan", float), ("1e999", float), ("1 inf", tuple[float, float]), ("1", tuple[float, float]), ("9" * 5000, int),
        ("[1", tuple[int, ...]), ("cuda", Literal["auto", "cpu"]), ("[" * 100_000, tuple[str, ...]),
        ("9" * 400 + "G", Annotated[int, Size()]),
    ],
)  # fmt: skip
def test_text_that_does_not_fit_is_refused_in_words(text: str, kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"^x: got .*, expected "):
        read_value("x", UntypedText(text), kind)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (True, int),
        (True, float),
        ("1", int),
        (1, str),
        (1.5, int),
        (float("nan"), float),
        (10**400, float),
        (None, int),
    ],
)
def test_values_of_a_file_keep_their_type(value: Any, kind: Any) -> None:
    with pytest.raises((ValueError, MsgspecError)):
        convert_value(value, kind)


def test_what_is_expected_is_said_in_words() -> None:
    assert describe_type(Port) == "a whole number from 0 to 65535"
    assert describe_type(Annotated[float, Meta(gt=0)]) == "a number above 0"
    assert describe_type(Annotated[int, Meta(ge=1)]) == "a whole number of at least 1"
    assert describe_type(Literal["a", "b"]) == "one of a, b"
    assert describe_type(tuple[float, float]) == "a list of 2, each a number"


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as error_info:
        read_value("api_keys", ["hush", 5], tuple[str, ...], is_secret=True)
    assert "hush" not in str(error_info.value)


@pytest.mark.parametrize("values", [("a=b", "foo"), ("foo",), ("foo", "bar")])
def test_of_a_repeated_flag_the_wrong_text_is_shown(values: Any) -> None:
    kind = tuple[Annotated[str, Meta(pattern="=", examples=["a=b"])], ...]
    with pytest.raises(ConfigError) as error_info:
        read_value("--pair", values, kind)
    assert str(error_info.value) == "--pair: got 'foo', expected text such as a=b"
    with pytest.raises(ConfigError, match="a value that is not shown here"):
        read_value("--pair", values, kind, is_secret=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "x"], "Invalid value for '--count': got 'x', expected a whole number from 0 to 64"),
        (["--count", "65"], "got '65', expected a whole number from 0 to 64"),
        (["--count", "1.5"], "got '1.5', expected a whole number from 0 to 64"),
        (["--seconds", "-1"], "Invalid value for '--seconds': got '-1', expected a number of at least 0"),
        (["--seconds", "nan"], "got 'nan', expected a number of at least 0"),
    ],
)
def test_a_number_of_a_command_is_refused_with_its_value_and_its_range(arguments: list[str], message: str) -> None:
    @click.command()
    @click.option("--count", type=NumberType(int, 0, 64), default=1)
    @click.option("--seconds", type=NumberType(float, 0), default=2.0)
    def command(count: int, seconds: float) -> None:
        click.echo(f"{count!r} {seconds!r}")

    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert CliRunner().invoke(command, []).output == "1 2.0\n"
    assert CliRunner().invoke(command, ["--count", "64", "--seconds", "0"]).output == "64 0.0\n"
