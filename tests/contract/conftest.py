"""A served model in this process, and a shell with a home of its own."""

from support.served import asked, model, serve, tool_model
from support.shells import direct, shell, tiny

__all__ = ["asked", "direct", "model", "serve", "shell", "tiny", "tool_model"]
