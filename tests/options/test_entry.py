"""How programs and their child processes meet signals, and a full disk."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from options.child_process import start_child
from options.entry import run_program


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "No space left on device"), "stand_in: [Errno 28] No space")],
)
def test_ctrl_c_and_a_full_disk_end_a_program_without_a_traceback(
    error: BaseException, status: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(args: list[str]) -> None:
        raise error

    monkeypatch.setitem(sys.modules, "stand_in", SimpleNamespace(main=main))
    with pytest.raises(SystemExit) as caught:
        run_program("stand_in", "stand_in", ("options",))
    assert str(caught.value.code).startswith(str(status))


def test_no_socket_takes_the_number_of_a_closed_standard_file(tmp_path: Path) -> None:
    """uvloop aborted the process when it closed such a socket."""
    (tmp_path / "stand_in.py").write_text("import os\ndef main(_): os.write(2, b'%d' % os.open(os.devnull, 0))\n")
    code = "from options.entry import run_program; run_program('stand_in', 'stand_in', ('options',))"
    for closed in ("<&-", ">&-", "<&- >&-"):
        completed = subprocess.run(
            ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], stderr=subprocess.PIPE, check=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))},
        )  # fmt: skip
        assert int(completed.stderr) > 2, closed


def test_the_first_process_of_a_container_ends_at_sigterm_before_its_own_handlers_are_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handlers = []
    monkeypatch.setitem(
        sys.modules, "stand_in", SimpleNamespace(main=lambda _: handlers.append(signal.getsignal(signal.SIGTERM)))
    )
    handler_before = signal.getsignal(signal.SIGTERM)
    run_program("stand_in", "stand_in", ("options",))
    monkeypatch.setattr(os, "getpid", lambda: 1)
    try:
        run_program("stand_in", "stand_in", ("options",))
    finally:
        signal.signal(signal.SIGTERM, handler_before)
    assert handlers[0] is handler_before
    assert callable(handlers[1])


def test_a_child_process_leaves_signals_to_its_parent_from_its_first_import_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stand_in_child.py").write_text(
        "import signal\n"
        "IGNORED = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]\n"
        "def main(fd):\n"
        "    return 0 if IGNORED == [signal.SIG_IGN] * 2 else 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    process, parent_socket = start_child("stand_in_child")
    with parent_socket:
        assert process.wait(timeout=60) == 0
