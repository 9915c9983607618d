"""Reads how much a request wants the model to think, for the switch of the model's template.

A template without such a switch, or without such an effort, is asked for what comes nearest; where
there is nothing near, the field changes nothing: clients send it to every model.
"""

from kvchat.chat.thinking import Think, ThinkSwitch
from kvchat.server.fields import Fields

# For each effort what to ask for, the best first.
_EFFORTS: dict[str, tuple[Think, ...]] = {
    "none": (Think.OFF, Think.LOW),
    "minimal": (Think.LOW, Think.OFF),
    "low": (Think.LOW, Think.ON),
    "medium": (Think.MEDIUM, Think.ON),
    "high": (Think.HIGH, Think.ON),
    "xhigh": (Think.HIGH, Think.ON),
    "max": (Think.HIGH, Think.ON),
}
_KINDS: dict[str, tuple[Think, ...]] = {
    "enabled": (Think.ON, Think.MEDIUM),
    "disabled": (Think.OFF, Think.LOW),
    "adaptive": (),
}


def asked_effort(fields: Fields, name: str, switch: ThinkSwitch, base: Think) -> Think:
    """Return what a field of OpenAI's interfaces asks for; `base` where it is missing."""
    effort = fields.text(name)
    if effort is None:
        return base
    if effort not in _EFFORTS:
        raise fields.fault(name, f"must be {', '.join(_EFFORTS)}")
    return _nearest(_EFFORTS[effort], switch)


def asked_thinking(fields: Fields, switch: ThinkSwitch, base: Think) -> Think:
    """Return what `thinking` of a message asks for; its budget changes nothing."""
    if "thinking" not in fields:
        return base
    thinking = fields.nested("thinking")
    kind = thinking.text("type")
    if kind not in _KINDS:
        raise thinking.fault("type", f"must be {', '.join(_KINDS)}")
    thinking.whole("budget_tokens", 0)
    return _nearest(_KINDS[kind], switch)


def _nearest(wanted: tuple[Think, ...], switch: ThinkSwitch) -> Think:
    return next((think for think in wanted if think in switch.known), Think.AUTO)
