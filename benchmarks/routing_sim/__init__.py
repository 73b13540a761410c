"""A discrete-event simulation of routers in front of engines: `benchmarks/routing.py` is its command."""
