"""Simulated engines on a virtual clock: step times, cache, queue, and requests.

`engine serve --simulate` uses the step times; `router shadow` and benchmarks/routing.py simulate fleets. Time is an
argument. The room imports neither a program nor torch.
"""

DISTRIBUTION = "blockcast"
