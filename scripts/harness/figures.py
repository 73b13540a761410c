"""Where figures come from and where they go: the machine, CPU and memory of processes, tables, JSON."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def describe_machine(*packages: str) -> dict[str, Any]:
    """What figures were measured on, with the versions of these packages."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    description: dict[str, Any] = {"cpu": cpu, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    description |= {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in packages:
        try:
            description[name] = version(name)
        except PackageNotFoundError:
            description[name] = None
    return description


def format_facts(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, its threads and its children so far, to the nanosecond."""
    total = 0.0
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0]) / 1e9
            total += sum(cpu_seconds(int(child)) for child in (task / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        pass  # a thread or child ended while we looked
    return total


def resident_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process (Linux)."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def percentile(values: Sequence[float], share: float) -> float:
    """The value at this share of all, by nearest rank."""
    return sorted(values)[max(0, math.ceil(len(values) * share) - 1)]


def markdown_table(
    rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], first_column: str = ""
) -> str:
    """A table to look at and for a README. `columns`: title -> (key of a row, format with {})."""
    cells = [
        [name, *(cell_format.format(row[key]) for key, cell_format in columns.values())] for name, row in rows.items()
    ]
    widths = [max(map(len, column)) for column in zip([first_column, *columns], *cells)]
    lines = [[first_column, *columns], ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])], *cells]
    padded_lines = (
        [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))] for line in lines
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in padded_lines)


def write_json(path: Path | None, report: Any) -> None:
    """Whole at all times: there is never half of it."""
    if path is not None:
        temporary_path = path.with_name(path.name + ".new")
        temporary_path.write_text(json.dumps(report, indent=1) + "\n")
        temporary_path.replace(path)
