"""How a rate that is kept follows what is measured. Knows numbers; not what they are rates of."""

# The newest measurement weighs a third: machines change their mind.
_NEWEST = 1 / 3
# So many times quicker than what was known is no hiccup: what was known was one.
_FAR_QUICKER = 4.0


def moved(rate: float | None, newest: float) -> float:
    """Return the rate to believe in after another measurement; None for the first."""
    return newest if rate is None else rate + _NEWEST * (newest - rate)


def moved_computing(rate: float | None, newest: float) -> float:
    """Return as `moved` a rate of computing, which much can make slow for once and nothing quick.

    The first step on a GPU compiles its kernels, which takes as long as a thousand steps: what it
    seemed to say was kept, and believed for a dozen prompts more.
    """
    if rate is not None and newest > _FAR_QUICKER * rate:
        return newest
    return moved(rate, newest)
