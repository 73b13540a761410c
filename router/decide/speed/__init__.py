"""Learning how fast targets are from the first tokens and answers that the router sees. Pure arithmetic.

The *prior* is a first guess, the configured `StepTimes`. Learned is by how much it is wrong. If the pool of targets
that serve a model has a prefill ratio of 2.0, computing prompts takes its targets twice as long as the prior says; the
step ratio says the same of the steps in which answers are written. A target that differs much from its pool has a
factor of its own, 1.5 if all work takes it half as long again.
"""

from router.decide.speed.observations import Observation, PrefillInterval, WorkTotals
from router.decide.speed.pool import PoolSpeed, Speed
from router.decide.speed.ratios import TimeFactor

__all__ = ["Observation", "PoolSpeed", "PrefillInterval", "Speed", "TimeFactor", "WorkTotals"]
