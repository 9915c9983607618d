"""A clock that only the test moves."""


class Clock:
    """A call returns the time in seconds."""

    def __init__(self, now_s: float = 1e9) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
