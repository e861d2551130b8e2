"""The scheduler: decides, step by step, which requests share the next model pass. No device, no tokenizer, no model."""

from pyengine.scheduler.admission import Admission
from pyengine.scheduler.batching import Batching
from pyengine.scheduler.capacity import Capacity
from pyengine.scheduler.order import Order
from pyengine.scheduler.packing import Packing
from pyengine.scheduler.plan import StepPlan
from pyengine.scheduler.scheduler import Scheduler
from pyengine.scheduler.verdict import Reason, Verdict
from pyengine.scheduler.victim import Victim

__all__ = [
    "Admission",
    "Batching",
    "Capacity",
    "Order",
    "Packing",
    "Reason",
    "Scheduler",
    "StepPlan",
    "Verdict",
    "Victim",
]
