"""The pieces of benchmarks/proxy.py: mock workers, the load generator, the gateways it compares."""
