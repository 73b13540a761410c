"""Shared base of the scripts that look for faults: programs with their logs, the faults that were found, the report."""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from harness.figures import describe_machine, write_json
from harness.programs import Program

TRACEBACK = "Traceback (most recent call last)"


class FaultRun:
    """Programs on trial. `close` ends them; their logs stay in `folder` where a fault was found."""

    def __init__(self, name: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"blockcast-{name}-"))
        self.exit_stack = ExitStack()
        self.faults: list[dict[str, str]] = []
        self._log_offsets: dict[Program, int] = {}
        """Program -> characters of its log that were looked at."""

    def watch_program(self, program: Program) -> Program:
        """Require that the program goes on and logs no traceback."""
        self._log_offsets[program] = 0
        return program

    def report_fault(self, check: str, description: str, reproducer: object = "") -> None:
        self.faults.append({"attack": check, "what": description[:600], "reproducer": repr(reproducer)[:4000]})

    def check_logs(self, attack: str) -> None:
        """Count tracebacks that were logged since the last call as faults of this attack. Raises RuntimeError if a
        program has ended."""
        for program, offset in self._log_offsets.items():
            text = program.read_log()
            self._log_offsets[program] = len(text)
            for trace in text[offset:].split(TRACEBACK)[1:3]:
                lines = [line for line in trace.splitlines()[1:] if line.strip(" ^~")]
                error_line = next((i for i, line in enumerate(lines) if not line.startswith(" ")), 0)
                self.report_fault(
                    attack, f"{program.log.stem} raised: {' | '.join(lines[max(0, error_line - 2) : error_line + 1])}"
                )
            if program.process.poll() is not None:
                status = program.process.poll()
                raise RuntimeError(f"{program.log.stem} ended with {status} after {attack}; {program.log}")

    def close(self) -> None:
        self.exit_stack.close()
        if not self.faults:
            shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, report: dict[str, Any], json_file: Path | None) -> None:
        """Write the report, print the faults, and exit: with status 1 if there are some."""
        write_json(json_file, {"machine": describe_machine(), **report, "faults": self.faults})
        for fault in self.faults[:40]:
            print(f"FAULT {fault['attack']}: {fault['what']}")
        print(f"{len(self.faults)} faults" + f"; logs in {self.folder}" * bool(self.faults))
        sys.exit(1 if self.faults else 0)
