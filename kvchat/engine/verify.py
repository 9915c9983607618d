"""Verify: which drafted tokens are what would have been drawn without them.

Row i of a verifying step is drawn with the noise of its own position, after the tokens drafted
before it. As long as those are right it is the very token that plain decoding draws there, so the
text does not depend on what was drafted: lossless for any drafter and any sampling, with neither
ratios of probabilities nor residual draws. Pure functions of token ids.
"""

from collections.abc import Sequence


def accepted_len(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many leading drafts are right.

    drawn   one token per row of the step, and so one more than there are drafts: the last that
            counts, at index `accepted_len`, was drawn after accepted tokens only
    """
    assert len(drawn) == len(drafts) + 1
    for index, (draft, token) in enumerate(zip(drafts, drawn, strict=False)):
        if draft != token:
            return index
    return len(drafts)
