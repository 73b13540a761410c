"""The README's plot, mean time to first token by policy, is drawn from the first table of docs/measurements/routing.md.

python tests/test_pictures.py       # draws it anew
"""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE, PICTURE = DOCS / "measurements" / "routing.md", DOCS / "pictures" / "ttft-by-policy.svg"
ROW = re.compile(r"^\| (?P<policy>[^|]+?) \| [^|]+ \| (?P<mean>[\d.*]+) \|", re.MULTILINE)
WIDTH, LABELS, ROW_HEIGHT, BAR = 760, 250, 30, 18


def read_means(text: str) -> dict[str, float]:
    """policy -> mean TTFT relative to one endless shared cache."""
    table = text[text.index("| policy | hit | mean TTFT") :]
    table = table[: table.index("\n\n")]
    return {row["policy"].strip("* "): float(row["mean"].strip("*")) for row in ROW.finditer(table)}


def draw(means: dict[str, float]) -> str:
    """An SVG of bars on a logarithmic scale, the best at the bottom."""
    order = sorted(means, key=lambda policy: -means[policy])
    decades = math.log10(max(means.values())) * 1.12
    scale = (WIDTH - LABELS - 70) / decades
    height = ROW_HEIGHT * len(order) + 74
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="16" y="26" font-size="15" font-weight="bold" fill="#15202b">'
        "Mean time to first token by policy</text>",
        '<text x="16" y="45" fill="#57606a">relative to one endless shared cache; lower is better; logarithmic</text>',
    ]
    for at, policy in enumerate(order):
        y = 60 + at * ROW_HEIGHT
        width = max(2.0, math.log10(means[policy]) * scale)
        ours = policy.startswith("Blockcast")
        colour = "#1f6feb" if ours else "#2da44e" if "(bound)" in policy else "#afb8c1"
        weight = ' font-weight="bold"' if ours else ""
        label, value = escape(policy), f"{means[policy]:g}"
        parts.append(f'<text x="{LABELS - 10}" y="{y + 14}" text-anchor="end" fill="#15202b"{weight}>{label}</text>')
        parts.append(f'<rect x="{LABELS}" y="{y}" width="{width:.1f}" height="{BAR}" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{LABELS + width + 8:.1f}" y="{y + 14}" fill="#15202b"{weight}>{value}</text>')
    return "\n".join([*parts, "</svg>", ""])


def test_the_plot_shows_the_table() -> None:
    means = read_means(TABLE.read_text())
    picture = draw(means)
    assert picture.count("<rect") == 1 + len(means) > 8, "the background, and a bar for each policy"
    assert picture == PICTURE.read_text(), "run python tests/test_pictures.py"


if __name__ == "__main__":
    PICTURE.write_text(draw(read_means(TABLE.read_text())))
