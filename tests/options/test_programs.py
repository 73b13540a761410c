"""Both programs' settings, all of them: each is refused where it is wrong, whichever way it comes, and documented."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from click.testing import CliRunner, Result

from engine.cli import cli as engine_cli
from engine.config import SCHEMA as ENGINE
from options import SECRET, ConfigError, Schema, Setting, load_config
from options.command import _list_visible_settings, render_settings_list
from options.fields import collect_values
from options.load import read_file
from options.values import UntypedText, split_annotated
from router.app.cli import cli as router_cli
from router.app.config import EPP_SCHEMA as EPP
from router.app.config import SCHEMA as ROUTER
from router.app.config import SHADOW_SCHEMA as SHADOW

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md"
CLIS = {"router": router_cli, "engine": engine_cli}
EVERY = [
    pytest.param(schema, setting, id=f"{schema.program}-{setting.path}")
    for schema in (ROUTER, ENGINE)
    for setting in schema.setting_by_path.values()
]
EVERY += [
    pytest.param(schema, setting, id=f"{name}-{path}")
    for name, schema in (("epp", EPP), ("shadow", SHADOW))
    for path, setting in schema.setting_by_path.items()
    if path not in ROUTER.setting_by_path
]
LEAVES = [case for case in EVERY if not case.values[1].is_section]  # type: ignore[union-attr]
FLAGS = [case for case in LEAVES if case.values[1].flag is not None]  # type: ignore[union-attr]


def wrong(kind: Any) -> Iterator[Any]:
    """Values of a wrong type or out of range, as a file has them."""
    bare, marks = split_annotated(kind)
    yield {"a": 1}
    if get_origin(bare) is tuple:
        yield "no list"
        yield [1] if get_args(bare)[0] is str else [1.0]
        yield [{}]
        for item in wrong(get_args(bare)[0]):
            yield [item]
        return
    yield ["a"]
    if get_origin(bare) is Literal:
        yield "what nobody offers"
        yield 1
    elif bare is str:
        yield 5
        yield True
    elif bare is bool:
        yield "perhaps"
        yield 2
    else:
        yield "abc"
        yield True
        yield math.nan
        yield math.inf
        yield 10**40 if bare is int else 1e300
        yield 1.5 if bare is int else "1.5"
        for meta in (mark for mark in marks if isinstance(mark, msgspec.Meta)):
            if meta.ge is not None:
                yield meta.ge - 1
            if meta.gt is not None:
                yield meta.gt
            if meta.le is not None:
                yield meta.le * 2 + 1
    for meta in (mark for mark in marks if isinstance(mark, msgspec.Meta)):
        if meta.pattern is not None:
            yield f"\0 no {meta.pattern}"
        if meta.min_length:
            yield ""
    if bare is str:
        yield "no UTF-8: \udcff"


def as_text(value: Any) -> str | None:
    """The same in a variable or a flag; None where text of that kind is right."""
    if isinstance(value, (bool, dict)):
        return None
    return json.dumps(value) if isinstance(value, list) else str(value)


def nest_value(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part: value}
    return value  # type: ignore[no-any-return]


def run_config_check(program: str, *args: str, **environment: str) -> Result:
    return CliRunner().invoke(CLIS[program], ["config", "--check", *args], env=environment)


@pytest.mark.parametrize(("schema", "setting"), EVERY)
def test_every_setting_has_a_type_a_range_and_a_line_of_help(schema: Schema, setting: Setting) -> None:
    assert setting.help_text
    assert "\n" not in setting.help_text
    bare, marks = split_annotated(setting.value_type)
    for kind in get_args(bare) if get_origin(bare) is tuple else (bare,):
        item, item_marks = split_annotated(kind)
        if item in (int, float):
            limits = [mark for mark in (*marks, *item_marks) if isinstance(mark, msgspec.Meta)]
            assert any(meta.ge is not None or meta.gt is not None for meta in limits), "no smallest value"
            assert any(meta.le is not None for meta in limits), "no largest value"


@pytest.mark.parametrize(("schema", "setting"), LEAVES)
def test_a_wrong_value_is_refused_in_a_file(schema: Schema, setting: Setting) -> None:
    for value in wrong(setting.value_type):
        with pytest.raises(ConfigError, match=rf"^f\.toml: {setting.path}.*expected") as error_info:
            load_config(schema, table=nest_value(setting.path, value), file_name="f.toml")
        if SECRET not in setting.annotation_marks and not isinstance(value, dict):
            assert repr(value)[:50] in str(error_info.value)


@pytest.mark.parametrize(("schema", "setting"), LEAVES)
def test_a_wrong_value_is_refused_in_the_environment_and_in_set(schema: Schema, setting: Setting) -> None:
    texts = [as_text(value) for value in wrong(setting.value_type)]
    for text in texts:
        if not text or _fits(setting, text):
            continue
        with pytest.raises(ConfigError, match=rf"^{schema.make_variable_name(setting.path)}: got .*expected"):
            load_config(schema, environment={schema.make_variable_name(setting.path): text})
        with pytest.raises(ConfigError, match=rf"^--set {setting.path}: got .*expected"):
            load_config(schema, settings=[f"{setting.path}={text}"])


@pytest.mark.parametrize(("schema", "setting"), FLAGS)
def test_a_wrong_value_is_refused_as_a_flag(schema: Schema, setting: Setting) -> None:
    kind, _ = split_annotated(setting.value_type)
    if kind is bool:
        return  # there is nothing that could be wrong
    if schema in (EPP, SHADOW):
        return  # `router config` does not take it
    for value in wrong(setting.value_type):
        items = value if get_origin(kind) is tuple and isinstance(value, list) else [value]
        text = as_text(items[0]) if items else None
        if text is None or _fits(setting, text) or (get_origin(kind) is tuple and _fits(setting, f"[{text!r}]")):
            continue
        if get_origin(kind) is tuple and get_args(kind)[0] is str:
            continue  # any text
        result = run_config_check(schema.program, setting.label, text)
        assert result.exit_code == 2, result.output
        assert f"{setting.label}: got " in result.output
        assert "Traceback" not in result.output


def _fits(setting: Setting, text: str) -> bool:
    """As text it is right after all: 1.5 where the file's "1.5" was wrong, a list's one word."""
    try:
        setting.parse_value("", UntypedText(text))
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize(("schema", "setting"), LEAVES)
def test_what_is_right_comes_through_each_way(schema: Schema, setting: Setting) -> None:
    """The default, or an example, set anew: the value and its origin; a flag wins over a variable, it over a file."""
    value = setting.default if setting.default not in (None, (), "") else _example(setting)
    if value is None:
        return  # a file that would have to exist
    plain = list(value) if isinstance(value, tuple) else value
    text = msgspec.json.encode(plain).decode() if isinstance(value, (tuple, bool, int, float)) else str(value)
    variable = schema.make_variable_name(setting.path)
    for sources, origin in (
        ({"table": nest_value(setting.path, plain), "file_name": "f"}, "f"),
        ({"environment": {variable: text}, "table": nest_value(setting.path, plain), "file_name": "f"}, variable),
        ({"settings": [f"{setting.path}={text}"], "environment": {variable: text}}, "--set"),
    ):
        loaded_config = load_config(schema, **sources)  # type: ignore[arg-type]
        actual = collect_values(loaded_config.config)[setting.path]
        assert actual == value
        assert "Text" not in {type(actual).__name__, *(type(item).__name__ for item in parts_of(actual))}
        assert loaded_config.origin_by_path[setting.path] == origin


def parts_of(value: Any) -> tuple[Any, ...]:
    """The items of a list. Configurations are sent to other processes, which know plain types only."""
    return value if isinstance(value, tuple) else ()


def _example(setting: Setting) -> Any:
    bare, marks = split_annotated(setting.value_type)
    if setting.annotation_marks and setting.annotation_marks != (SECRET,):
        return None
    if setting.path.startswith("tls"):
        return None
    if get_origin(bare) is tuple:
        item = split_annotated(get_args(bare)[0])
        return (next((example for mark in item[1] for example in mark.examples or ()), "http://a:1"),)
    if get_origin(bare) is Literal:
        return get_args(bare)[0]
    examples = [example for mark in marks if isinstance(mark, msgspec.Meta) for example in mark.examples or ()]
    return examples[0] if examples else {int: 7, float: 7.0}.get(bare, "text")


def test_a_key_from_a_secret_that_ends_with_a_newline_is_the_key() -> None:
    environment = {"ROUTER_ADMIN_API_KEY": "key\n", "ROUTER_API_KEY": "a b\n", "ROUTER_WORKER_API_KEY": " \n"}
    loaded = load_config(ROUTER, environment=environment)
    assert loaded.config.admin_api_key == "key"
    assert loaded.config.edge.api_keys == ("a", "b")
    assert loaded.config.worker_api_key is None


def test_a_flag_wins_over_the_environment_and_it_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text("port = 1\nhost = 'h'\nsession_ttl_s = 5\n[cost]\ncongestion_weight = 3\n[queue]\nfair = true\n")
    result = run_config_check("router", "--config", str(file), "--port", "3", "--no-fair", BLOCKCAST_ROUTER_PORT="2",
               BLOCKCAST_ROUTER_HOST="e", BLOCKCAST_ROUTER_QUEUE_FAIR="true")  # fmt: skip
    assert result.exit_code == 0, result.output
    for line in ("port = 3  # --port", 'host = "e"  # BLOCKCAST_ROUTER_HOST', f"congestion_weight = 3.0  # {file}",
                 "fair = false  # --fair", f"session_ttl_s = 5.0  # {file}", "seed = 0  # default"):  # fmt: skip
        assert line in result.output.splitlines()


@pytest.mark.parametrize("program", ["router", "engine"])
def test_what_check_prints_is_a_file_that_says_the_same(program: str, tmp_path: Path) -> None:
    first = run_config_check(program, "--port", "7", "--log-level", "debug").output
    file = tmp_path / "again.toml"
    file.write_text(first)
    second = run_config_check(program, "--config", str(file)).output
    assert [line.split("  # ")[0] for line in first.splitlines()] == [
        line.split("  # ")[0] for line in second.splitlines()
    ]


def test_check_prints_that_events_are_on_where_nothing_is_said_of_them() -> None:
    assert "enable_kv_cache_events = true  # default" in run_config_check("engine").output
    assert (
        "enable_kv_cache_events = false  # default" in run_config_check("engine", "--set", "kv_events.topic=t").output
    )


@pytest.mark.parametrize("program", ["router", "engine"])
def test_keys_are_never_printed(program: str, tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text('api_keys = ["hush1"]\n')
    variable = f"{program.upper()}_API_KEY"
    for result in (
        run_config_check(program, "--config", str(file)),
        run_config_check(program, "--api-key", "hush2"),
        run_config_check(program, **{variable: "hush3"}),
    ):
        assert result.exit_code == 0, result.output
        assert "hush" not in result.output
        assert "api_keys is set" in result.output
    file.write_text("api_keys = 5\n")
    assert "5" not in run_config_check(program, "--config", str(file)).output.partition("got")[2]


@pytest.mark.parametrize(
    ("sources", "nearest"),
    [
        ({"table": {"cost": {"congestion_weigh": 1}}}, "cost.congestion_weight"),
        ({"table": {"congestion_weight": 1}}, "cost.congestion_weight"),
        ({"table": {"timeout": {"connect_s": 1}}}, "timeouts.connect_s"),
        ({"settings": ["prot=1"]}, "port"),
        ({"environment": {"BLOCKCAST_ROUTER_PROT": "1"}}, "BLOCKCAST_ROUTER_PORT"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(sources: Any, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"no such setting, the nearest is {nearest} "):
        load_config(ROUTER, **sources)


def test_what_kubernetes_sets_is_left_alone_or_explained() -> None:
    names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8080_TCP", "PORT_8080_TCP_ADDR")
    load_config(ROUTER, environment={f"BLOCKCAST_ROUTER_{name}": "tcp://10.0.0.1:8080" for name in names})
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        load_config(ROUTER, environment={"BLOCKCAST_ROUTER_PORT": "tcp://10.0.0.1:8080"})


@pytest.mark.parametrize(
    "content", [b"port = ", b"\xff", b"[cost\n", b"cost = 5\n", b"a.b.c = 1\n", b"port = 2020-01-01\n"]
)
def test_a_broken_file_is_one_line(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_bytes(content)
    for path in (file, tmp_path / "missing.toml", tmp_path):
        result = run_config_check("router", "--config", str(path))
        assert result.exit_code == 2
        assert str(path) in result.output
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--worker", "http://a:1", "--worker", "http://a:1"), "worker a:1 is given twice"),
        (("--worker", "ftp://a"), "worker url"),
        (("--tls-cert", __file__), "expected both or neither"),
        (("--admin", "127.0.0.1:70000"), "--admin"),
        (("--reuse-port", "--port", "0"), "--reuse-port: give --port a number"),
        (("--set", "cost"), "KEY=VALUE"),
        (("--set", "learn=5"), "expected a table"),
        (("--workers-file", "/nowhere"), "a file that exists"),
        (("--tokenizer", __file__), "a folder that exists"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(args: tuple[str, ...], says: str) -> None:
    result = run_config_check("router", *args)
    assert result.exit_code == 2
    assert says in result.output


def test_a_line_of_the_workers_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "workers"
    file.write_text("http://a:1\nnonsense=1\n")
    assert f"{file}:2" in run_config_check("router", "--workers-file", str(file)).output


def test_a_line_of_the_workers_file_that_would_replace_another_worker_is_refused(tmp_path: Path) -> None:
    """A copied line whose id was not changed took the first worker away without a word."""
    file = tmp_path / "workers"
    file.write_bytes(b"\xef\xbb\xbfhttp://a:1\r\nhttp://a:1\r\n")  # as an editor of Windows writes it, and harmless
    assert run_config_check("router", "--workers-file", str(file)).exit_code == 0
    file.write_text("url=http://a:1,id=w\nurl=http://b:1,id=w\n")
    output = run_config_check("router", "--workers-file", str(file)).output
    assert f"{file}:2: worker w is given twice, with other settings" in output


def test_a_whole_section_comes_as_json() -> None:
    loaded_config = load_config(ENGINE, environment={"BLOCKCAST_ENGINE_KV_EVENTS": '{"topic": "t", "hwm": 5}'})
    assert (loaded_config.config.engine.kv_events.topic, loaded_config.config.engine.kv_events.hwm) == ("t", 5)
    for text in ("[1]", "{", "5", "abc"):
        with pytest.raises(ConfigError, match="--kv-events-config"):
            load_config(ENGINE, flags={"kv_events": text})
    with pytest.raises(ConfigError, match=r"--kv-events-config\.hwn: no such setting, the nearest is kv_events.hwm"):
        load_config(ENGINE, flags={"kv_events": '{"hwn": 5}'})


def with_listing(page: str, schema: Schema) -> str:
    mark = f"{schema.program}-settings"
    before, _, tail = page.partition(f"<!-- {mark} -->")
    settings = render_settings_list(schema)
    return f"{before}<!-- {mark} -->\n{settings}<!-- /{mark} -->{tail.partition(f'<!-- /{mark} -->')[2]}"


@pytest.mark.parametrize("schema", [ROUTER, ENGINE], ids=lambda schema: schema.program)
def test_the_page_holds_the_list(schema: Schema) -> None:
    """As `router config` and `engine config` print it; `python tests/options/test_programs.py` writes it there."""
    text = PAGE.read_text()
    assert text == with_listing(text, schema)
    settings_list = render_settings_list(schema)
    assert all(f"`{setting.path}`" in settings_list for setting in _list_visible_settings(schema))


def test_the_page_s_file_is_one(tmp_path: Path) -> None:
    file = tmp_path / "router.toml"
    file.write_text(PAGE.read_text().partition("```toml\n")[2].partition("```")[0])
    config = load_config(ROUTER, table=read_file(file)).config
    assert config.conversation_cache_mb == 1024
    assert len(config.worker_flags) == 2


@pytest.mark.parametrize("schema", [ROUTER, ENGINE], ids=lambda schema: schema.program)
def test_variables_and_parameters_are_one_to_one(schema: Schema) -> None:
    assert len({schema.make_variable_name(path) for path in schema.setting_by_path}) == len(schema.setting_by_path)
    names = [
        name for setting in schema.setting_by_path.values() if setting.flag is not None for name in setting.flag_names
    ]
    assert len(names) == len(set(names))


if __name__ == "__main__":
    PAGE.write_text(with_listing(with_listing(PAGE.read_text(), ROUTER), ENGINE))
