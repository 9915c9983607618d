"""What libraries in C read from this process's environment, and no program of the user's."""

import os


def set_for_libraries(name: str, value: str) -> None:
    """Set a variable that only libraries of this process read, unless the user has set it.

    `os.environ` stays as it is: a program that is started with it as `env` sees no such variable,
    and one that is started without `env` does.
    """
    if name not in os.environ:
        os.putenv(name, value)
