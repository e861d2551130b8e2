"""The scheduler: decides, step by step, which requests share the next model pass. No device, no tokenizer, no model."""

from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "StepPlan"]
