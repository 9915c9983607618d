"""Reads an AttentionSpan from a mask function by evaluating it.

transformers describes a mask as a function of (batch, head, query position, key position). Some
models state their window nowhere else. Knows causal, windowed and chunked masks; refuses others.
"""

from collections.abc import Callable

import torch

from kvchat_kernels.paged_attention import FULL, AttentionSpan

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Positions far enough apart that any window or chunk a model could have shows at one of them.
_PROBED_QUERIES = (0, 1, 5, 63, 1_000, 4_095, 65_537, 1_048_575, 4_194_303)


class UnknownMask(Exception):
    """The mask is neither causal, windowed nor chunked."""


def read_span(mask_function: MaskFunction) -> AttentionSpan:
    """Return the span `mask_function` describes; raises UnknownMask for any other shape."""
    sees = _evaluator(mask_function)
    last = _PROBED_QUERIES[-1]
    first = _first_visible(sees, last)
    candidates = [
        FULL,
        AttentionSpan(window=last - first + 1),
        AttentionSpan(chunk=_chunk_size(sees, first)),
    ]
    for candidate in candidates:
        if all(_agrees(sees, candidate, query) for query in _PROBED_QUERIES):
            return candidate
    raise UnknownMask


def _evaluator(mask_function: MaskFunction) -> Callable[[int, int], bool]:
    zero = torch.tensor(0)

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(key)))

    return sees


def _first_visible(sees: Callable[[int, int], bool], query: int) -> int:
    """Find the lowest key a query sees, by bisection: visible keys are one run that ends at it."""
    if not sees(query, query):
        raise UnknownMask
    low, high = 0, query
    while low < high:
        middle = (low + high) // 2
        if sees(query, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _chunk_size(sees: Callable[[int, int], bool], first: int) -> int:
    """Return how many queries see the key `first`, by bisection: the chunk's size if it is one."""
    low, high = first, first + _PROBED_QUERIES[-1]
    while low < high:
        middle = (low + high + 1) // 2
        if sees(middle, first):
            low = middle
        else:
            high = middle - 1
    return low - first + 1


def _agrees(sees: Callable[[int, int], bool], span: AttentionSpan, query: int) -> bool:
    first = span.first_visible(query)
    middle = (first + query) // 2
    inside = {first, min(first + 1, query), middle, (middle + query) // 2, max(query - 1, first)}
    before = {0, 1, first // 2, first - 2, first - 1}
    outside = {query + 1, query + 7, *(key for key in before if 0 <= key < first)}
    return all(sees(query, key) for key in inside) and not any(sees(query, key) for key in outside)
