"""Settings that a conversation has when it is opened again: saved with it, read from it.

Those of answers (`/set`, flags) are compared with what this process has without them. Those of the
model (draft, endpoint, ...) come from the host, and `cli/settings.py` reads them.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvchat.chat.answer_settings import AskOptions, value_of, with_values
from kvchat.chat.conversation import Conversation
from kvchat.core.errors import UsageError
from kvchat.core.parameters import OF_ANSWERS, SAMPLING


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """How answers are generated without a conversation, and what holds in each.

    plain         the options of this process without flags
    given         values of flags, which hold in every conversation
    keeps_model   whether a flag names the model: a conversation that is opened does not change it
    """

    plain: AskOptions
    given: Mapping[str, Any] = field(default_factory=dict)
    keeps_model: bool = False

    def options(self, conversation: Conversation | None) -> AskOptions:
        """Return how answers are generated in a conversation that is opened; None is a new one."""
        saved = conversation.settings if conversation is not None else None
        return with_values(self.plain, {**restored(saved or {}), **self.given})

    def to_save(
        self, conversation: Conversation, options: AskOptions, of_model: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return what a conversation goes on with later, as values for JSON by their names.

        The flags of a script hold for its answers only.
        """
        if options.is_one_shot:
            return {**of_model, **restored(conversation.settings or {})}
        return {**of_model, **changes(options, self.plain)}


def changes(options: AskOptions, plain: AskOptions) -> dict[str, Any]:
    """Return the settings by which options differ from plain ones, as values for JSON by names."""
    changed = {}
    for parameter in OF_ANSWERS:
        value, is_sampling = value_of(parameter, options), parameter in SAMPLING
        if is_sampling and parameter.name not in options.chosen:
            continue
        is_chosen_before = not is_sampling or parameter.name in plain.chosen
        if value != value_of(parameter, plain) or not is_chosen_before:
            changed[parameter.name] = list(value) if isinstance(value, tuple) else value
    return changed


def restored(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of answers among saved values, without those that are not allowed."""
    values: dict[str, Any] = {}
    for parameter in OF_ANSWERS:
        if parameter.name not in saved:
            continue
        value = saved[parameter.name]
        may_be_none = parameter not in SAMPLING and parameter.default is None
        with suppress(UsageError):
            is_none = value is None and may_be_none
            values[parameter.name] = None if is_none else parameter.checked(value, parameter.name)
    return values
