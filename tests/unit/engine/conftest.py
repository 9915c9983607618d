"""A slower tier with its processes, and patience for a disk that stands still for seconds."""

from support.restarts import patience_with_the_disk, processes, tier

__all__ = ["patience_with_the_disk", "processes", "tier"]
