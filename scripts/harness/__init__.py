"""What the benchmarks and the scripts that break things share: programs, one load client, figures, scripted workers."""
