"""A simulated engine: its steps sleep instead of computing; everything else is the real engine. Imports no torch."""
