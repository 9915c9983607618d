"""A shell with a home of its own, and tiny checkpoints to point it at."""

from support.shells import direct, shell, tiny

__all__ = ["direct", "shell", "tiny"]
