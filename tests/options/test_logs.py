"""Both programs log alike: one JSON object a line where that is asked for, whatever is in a message."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from options.logs import configure_logging


@pytest.fixture(autouse=True)
def restore_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_a_line_is_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", as_json=True)
    log = logging.getLogger("some.part")
    log.debug("unseen")
    log.info('two\nlines and a "quote" of %s', b"\xff", extra={"fields": {"worker": "w0", "odd": {1, 2}}})
    try:
        raise ValueError("a reason")
    except ValueError:
        log.exception("it failed")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["worker"]) == ("info", "some.part", "w0")
    assert first["message"] == "two\nlines and a \"quote\" of b'\\xff'"
    assert second["level"] == "error"
    assert "ValueError: a reason" in second["exception"]


def test_lines_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", as_json=False)
    logging.getLogger("some.part").info("unseen")
    logging.getLogger("some.part").warning("seen")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("WARNING some.part: seen")


def test_a_clients_text_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", as_json=False)
    log = logging.getLogger("router")
    log.info("request model=%s", "x\n01:00:00 ERROR   router: forged\r\x1b[2J\x85\u2028 \u00e9\u4e2d")
    try:
        raise ValueError("a reason")
    except ValueError:
        log.exception("it failed")
    line, *failure = capsys.readouterr().err.split("\n")
    assert line.endswith("model=x\\n01:00:00 ERROR   router: forged\\r\\x1b[2J\\x85\\u2028 \u00e9\u4e2d")
    assert failure[1].startswith("Traceback")
