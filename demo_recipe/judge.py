"""Whether a reply says what it must and nothing it must not. Knows regular expressions only."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a reply; empty tuples for a good one."""

    missing: tuple[str, ...]
    forbidden: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        return not self.missing and not self.forbidden


def judge(reply: str, all_of: Sequence[Sequence[str]], none_of: Sequence[str] = ()) -> Verdict:
    """Judge a reply; patterns match anywhere, without regard to case.

    all_of    groups of alternatives: the reply must match one of each group
    none_of   patterns the reply must not match
    """
    missing = ["|".join(group) for group in all_of if not any(_found(p, reply) for p in group)]
    forbidden = [pattern for pattern in none_of if _found(pattern, reply)]
    return Verdict(tuple(missing), tuple(forbidden))


def _found(pattern: str, reply: str) -> bool:
    return re.search(pattern, reply, re.IGNORECASE) is not None
