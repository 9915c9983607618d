"""A served model: the whole server above a scripted engine, called in this process."""

from support.served import asked, serve

__all__ = ["asked", "serve"]
