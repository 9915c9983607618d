"""The words for what the next message costs: the same on every screen, from one `Cost`.

"ready" where nearly nothing has to be computed, "cold" where nearly all has to be, and in between
both numbers. Pure functions.
"""

from kvchat.chat.host import TurnCost
from kvchat.core.stats import Cost
from kvchat.core.types import CachedTokens
from kvchat.terminal.status import format_seconds, plural


def sentence(cost: Cost) -> str:
    """Return the long form, such as `ready: 752 of 766 tokens on disk, about 0.1 s`."""
    total = plural(cost.num_tokens, "token")
    if cost.is_cold:
        return f"cold: {total} to read{_about(cost)}"
    there = f"{cost.num_cached:,} of {total} {places(cost.cached)}"
    if cost.is_ready:
        return f"ready: {there}{_about(cost)}"
    return f"partly ready: {there}, {cost.num_read:,} to read{_about(cost)}"


def for_toolbar(cost: Cost) -> str:
    """Return the toolbar's form: `ready: 752 of 766 on disk`, or `cold, about 14 s`."""
    if cost.is_cold:
        return f"cold{_about(cost)}"
    there = f"{cost.num_cached:,} of {cost.num_tokens:,} {places(cost.cached)}"
    return f"ready: {there}" if cost.is_ready else f"{there}{_about(cost)}"


def for_list(cost: Cost) -> str:
    """Return the form for one of many: `ready in 0.2 s`, `cold, about 14 s`."""
    if cost.is_ready:
        return f"ready in {seconds(cost.seconds)}" if cost.seconds is not None else "ready"
    return f"{'cold' if cost.is_cold else 'partly ready'}{_about(cost)}"


def for_tree(turn: TurnCost) -> str:
    """Return where a turn's KV is, and the seconds to continue from there: `disk 0.1 s`."""
    about = f" {seconds(turn.cost.seconds)}" if turn.cost.seconds is not None else ""
    return f"{turn.tier or 'cold'}{about}"


def price(cost: Cost, action: str, verb: str = "re-reads") -> str:
    """Return the price of an action: `/edit re-reads 1,240 of 9,812 tokens, about 0.9 s`."""
    total = plural(cost.num_tokens, "token")
    return f"{action} {verb} {cost.num_read:,} of {total}{_about(cost)}"


def seconds(number: float) -> str:
    """Return an estimate: no more exact than a tenth of a second, and never nothing."""
    return f"{max(0.1, round(number, 1)):.1f} s" if number < 0.95 else format_seconds(number)


def places(cached: CachedTokens) -> str:
    """Return where cached tokens are, such as `on device and disk`."""
    names = [name for name, count in cached.places.items() if count]
    return f"on {', '.join(names[:-1])} and {names[-1]}" if names[1:] else f"on {''.join(names)}"


def _about(cost: Cost) -> str:
    return f", about {seconds(cost.seconds)}" if cost.seconds is not None else ""
