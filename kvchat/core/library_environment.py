"""What libraries in C read from this process's environment, and no program that it starts."""

import os


def set_for_libraries(name: str, value: str) -> None:
    """Set a variable that only libraries of this process read, unless the user has set it.

    `os.environ` stays as it is: tools and clients get their environment from there.
    """
    if name not in os.environ:
        os.putenv(name, value)
