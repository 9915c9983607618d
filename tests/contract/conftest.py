"""A served model in this process, and a shell with a home of its own."""

from support.served import asked, serve
from support.shells import direct, shell, tiny

__all__ = ["asked", "direct", "serve", "shell", "tiny"]
