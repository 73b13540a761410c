"""KV that moves between workers, on the wire: the words of each engine, and the prefill at one worker for another."""
