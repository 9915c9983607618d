"""Patience for a disk that stands still for seconds."""

from support.restarts import patience_with_the_disk

__all__ = ["patience_with_the_disk"]
