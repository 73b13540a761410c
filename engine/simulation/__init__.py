"""An engine that takes its time: steps sleep instead of computing, all else is the engine's own. No torch here."""
