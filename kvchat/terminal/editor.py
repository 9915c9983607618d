"""Runs the user's editor on a text.

Knows temporary files and programs; whoever calls has given the terminal away.
"""

import asyncio
import os
import shlex
import tempfile
from pathlib import Path

from kvchat.core.errors import UsageError


async def edit_text(editor: str, text: str) -> str:
    """Return a text as the user left it; raises UsageError where the editor does not run.

    `editor` is a command line. An editor that ends with an error leaves the text as it was.
    """
    try:
        arguments = shlex.split(editor)
    except ValueError as error:
        raise UsageError(f"The editor cannot be run: {error}.", "Set EDITOR.") from error
    if not arguments:
        raise UsageError("No editor is set.", "Set EDITOR.")
    with tempfile.TemporaryDirectory(prefix="kvchat-") as directory:  # private by its mode
        path = Path(directory) / "message.md"
        path.write_text(text, encoding="utf-8", errors="replace")
        path.chmod(0o600)
        try:
            process = await asyncio.create_subprocess_exec(*arguments, os.fspath(path))
        except OSError as error:
            raise UsageError(f"{arguments[0]} cannot be run: {error.strerror}.") from error
        if await process.wait() != 0:
            return text
        edited = path.read_text(encoding="utf-8", errors="replace")
    return edited.removesuffix("\n")
