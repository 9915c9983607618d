"""What transformers reports of weights that it has read: tensors that are missing, and others."""

from collections.abc import Collection
from typing import Any

from kvchat.core.errors import ModelError
from kvchat.model.checkpoint.source import ModelSource


def refuse_gaps(source: ModelSource, report: dict[str, Any]) -> None:
    """Raise ModelError for missing tensors, which transformers would initialise at random."""
    gaps = sorted(report["missing_keys"]) + sorted(key[0] for key in report["mismatched_keys"])
    if gaps:
        raise ModelError(
            f"{source.name} lacks {len(gaps)} of its model's tensors, {gaps[0]} for one, or has "
            "them in other shapes.",
            "Is the download complete, and does config.json belong to these weights?",
        )


def leftovers(source: ModelSource, unexpected: Collection[str]) -> tuple[str, ...]:
    """Return a note on tensors that the model does not use, if there are any.

    transformers has already removed those that the model class declares as expected.
    """
    if not unexpected:
        return ()
    return (
        f"{source.name} has {len(unexpected)} tensors its model does not use, {min(unexpected)} "
        "for one. Where answers are poor, config.json may not belong to these weights.",
    )
