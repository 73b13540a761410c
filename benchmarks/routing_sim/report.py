"""The table and the picture."""

from __future__ import annotations

from pathlib import Path

from routing_sim.runs import BOUNDS, Score, Setting

COLUMNS = (
    ("hit", "hit"),
    ("ttft_mean", "TTFT mean"),
    ("ttft_p50", "p50"),
    ("ttft_p99", "p99"),
    ("ttft_p999", "p99.9"),
    ("e2e", "E2E"),
    ("imbalance", "imbalance"),
)


def print_table(ratios: dict[str, dict[str, float]], settings: list[Setting], took_s: float) -> None:
    """Best mean TTFT last but for the bounds."""
    print(f"\nGeometric means over {len(settings)} settings, relative to INF (imbalance: busiest worker over mean)")
    print(f"{'policy':<18}" + "".join(f"{title:>11}" for _, title in COLUMNS))
    order = sorted((n for n in ratios if n not in BOUNDS), key=lambda n: -ratios[n]["ttft_mean"])
    for name in [*order, "POOL", "INF"]:
        print(f"{name:<18}" + "".join(f"{ratios[name][key]:>11.2f}" for key, _ in COLUMNS))
    print(f"{took_s:.0f} s")


def print_chat(scores: dict[str, Score]) -> None:
    """Absolute figures, the shortest mean answer last."""
    head = "E2E s    p50    p99 | TTFT ms    p50     p99 | TPOT ms   p50    p99 |  hit"
    head += "  seat waits (in vain)  preempted  busiest"
    print(f"{'policy':<16}{head}")
    for name in sorted(scores, key=lambda n: -scores[n].e2e):
        s = scores[name]
        print(
            f"{name:<15}{s.e2e:>6.2f} {s.e2e_p50:>6.2f} {s.e2e_p99:>6.1f} | {s.ttft_mean * 1e3:>7.0f} "
            f"{s.ttft_p50 * 1e3:>6.0f} {s.ttft_p99 * 1e3:>7.0f} | {s.tpot_mean * 1e3:>7.1f} {s.tpot_p50 * 1e3:>5.1f} "
            f"{s.tpot_p99 * 1e3:>6.1f} | {s.hit:>4.2f} {s.seat_waits:>11} {s.seat_waits_vain:>9} {s.preemptions:>10} "
            f"{s.busiest:>8.2f}"
        )


def write_plot(path: Path, ratios: dict[str, dict[str, float]]) -> None:
    """Mean and p99 TTFT of each policy, on a log scale. Raises SystemExit where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted((n for n in ratios if n != "INF"), key=lambda n: -ratios[n]["ttft_mean"])
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(names) + 1.5))
    places = range(len(names))
    axes.barh([p + 0.2 for p in places], [ratios[n]["ttft_mean"] for n in names], height=0.38, label="mean TTFT")
    axes.barh([p - 0.2 for p in places], [ratios[n]["ttft_p99"] for n in names], height=0.38, label="p99 TTFT")
    axes.set_yticks(list(places), names)
    axes.set_xscale("log")
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("relative to one infinite shared cache (less is better)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
