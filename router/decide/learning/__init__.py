"""Learning how fast targets are, and how long answers are, from the answers that the router sees. Pure arithmetic.

The *prior* is a first guess, the configured `StepTimes`. Learned is by how much it is wrong. If the pool of targets
that serve a model has a prefill ratio of 2.0, computing prompts takes its targets twice as long as the prior says; the
step ratio says the same of the steps in which answers are written. A target that differs much from its pool has a
factor of its own, 1.5 if all work takes it half as long again.
"""

from router.decide.learning.observations import Observation, PrefillInterval, WorkTotals
from router.decide.learning.ratios import TimeFactor
from router.decide.learning.speed import PoolSpeed, Speed

__all__ = ["Observation", "PoolSpeed", "PrefillInterval", "Speed", "TimeFactor", "WorkTotals"]
