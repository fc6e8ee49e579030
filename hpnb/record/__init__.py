"""The measured side: Timeline, MemoryProfile and Traffic as data, and the recorders that fill them."""

from hpnb.record.memory_budget import OutOfBudget, Survivors
from hpnb.record.memory_profile import CATEGORIES, MemoryProfile, MemorySample
from hpnb.record.memory_recorder import MemoryRecorder, memory
from hpnb.record.recorder import Recorder, timeline
from hpnb.record.timeline import Event, Timeline
from hpnb.record.traffic import Message, Traffic, ring_bytes, traffic

__all__ = [
    "CATEGORIES",
    "Event",
    "MemoryProfile",
    "MemoryRecorder",
    "MemorySample",
    "Message",
    "OutOfBudget",
    "Recorder",
    "Survivors",
    "Timeline",
    "Traffic",
    "memory",
    "ring_bytes",
    "timeline",
    "traffic",
]
