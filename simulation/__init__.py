"""Simulated engines: step times, the cache and the queue of an engine on a virtual clock, and the requests they play.

`engine serve --simulate` sleeps by the step times, `router shadow` and benchmarks/routing.py play whole fleets. Pure:
time is an argument. Imports neither a program nor torch.
"""

DISTRIBUTION = "blockcast"
