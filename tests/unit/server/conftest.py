"""A served model: the whole server above a scripted engine, called in this process."""

from support.served import asked, model, serve, tool_model

__all__ = ["asked", "model", "serve", "tool_model"]
