"""Reads how much a request wants the model to think, for the switch of the model's template.

A template without such a switch, or without such an effort, is asked for what comes nearest; where
there is nothing near, the field changes nothing: clients send it to every model. Each interface has
a field of its own; those of other servers say the same.
"""

from kvchat.chat.fields import Fields
from kvchat.chat.thinking import Think, ThinkSwitch

Wanted = tuple[Think, ...]  # what to ask for, the best first

_EFFORTS: dict[str, Wanted] = {
    "none": (Think.OFF, Think.LOW),
    "minimal": (Think.LOW, Think.OFF),
    "low": (Think.LOW, Think.ON),
    "medium": (Think.MEDIUM, Think.ON),
    "high": (Think.HIGH, Think.ON),
    "xhigh": (Think.HIGH, Think.ON),
    "max": (Think.HIGH, Think.ON),
    # The words of `--think`.
    "auto": (),
    "on": (Think.ON, Think.MEDIUM),
    "off": (Think.OFF, Think.LOW),
}
_KINDS: dict[str, Wanted] = {
    "enabled": (Think.ON, Think.MEDIUM),
    "disabled": (Think.OFF, Think.LOW),
    "adaptive": (),
}
_KWARGS = "chat_template_kwargs"
_SWITCHES = ("enable_thinking", "thinking", "think")
_BUDGETS = ("thinking_budget", "reasoning_budget")


def asked_effort(fields: Fields, switch: ThinkSwitch, base: Think) -> Think:
    """Return what a body of OpenAI's interfaces asks for; `base` where it does not say."""
    wanted = _effort(fields, "reasoning_effort")
    if wanted is None:
        reasoning = fields.nested("reasoning")
        wanted = _effort(reasoning, "effort")
        wanted = _switched(reasoning, "enabled") if wanted is None else wanted
    return _nearest(_elsewhere(fields) if wanted is None else wanted, switch, base)


def asked_thinking(fields: Fields, switch: ThinkSwitch, base: Think) -> Think:
    """Return what a message asks for; the budget of its `thinking` changes nothing.

    The effort counts where the model may decide whether it thinks.
    """
    wanted = _elsewhere(fields)
    if not wanted:
        effort = _effort(fields.nested("output_config"), "effort")
        wanted = effort if wanted is not None and effort is not None else wanted
    return _nearest(wanted, switch, base)


def _elsewhere(fields: Fields) -> Wanted | None:
    """Return what the fields of other servers ask for, None where there are none.

    Raises ApiError for an argument of the template that is no switch of thinking.
    """
    template = fields.nested(_KWARGS)
    known = (*_SWITCHES, *_BUDGETS, "reasoning_effort")
    template.refuse(*(name for name in template.values if name not in known))
    for holder in (fields, template):
        for name in _SWITCHES:
            if (wanted := _switched(holder, name)) is not None:
                return wanted
        for name in _BUDGETS:
            if (budget := holder.whole(name, -1)) is not None:
                return _KINDS["disabled" if budget == 0 else "enabled"]
    return _effort(template, "reasoning_effort")


def _switched(holder: Fields, name: str) -> Wanted | None:
    """Return what a switch says: true or false, an effort, or an object with the kind."""
    value = holder.raw(name)
    if isinstance(value, str):
        return _effort(holder, name)
    if isinstance(value, dict):
        kind, switch = holder.nested(name).text("type"), holder.nested(name)
        if kind not in _KINDS:
            raise switch.fault("type", f"must be one of {', '.join(_KINDS)}")
        switch.whole("budget_tokens", 0)
        return _KINDS[kind]
    return None if value is None else _KINDS["enabled" if holder.flag(name) else "disabled"]


def _effort(holder: Fields, name: str) -> Wanted | None:
    effort = holder.text(name)
    if effort is not None and effort not in _EFFORTS:
        raise holder.fault(name, f"must be one of {', '.join(_EFFORTS)}")
    return None if effort is None else _EFFORTS[effort]


def _nearest(wanted: Wanted | None, switch: ThinkSwitch, base: Think) -> Think:
    if wanted is None:
        return base
    return next((think for think in wanted if think in switch.known), Think.AUTO)
