"""The measured side: Timeline, MemoryProfile and Traffic as data, and the recorders that fill them."""

from hpnb.record.memory_profile import CATEGORIES, MemoryProfile, MemorySample
from hpnb.record.timeline import Event, Timeline

__all__ = ["CATEGORIES", "Event", "MemoryProfile", "MemorySample", "Timeline"]
