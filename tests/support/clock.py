"""A clock that only the test moves."""


class Clock:
    """Seconds, for whoever calls it."""

    def __init__(self, now_s: float = 1e9) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
