"""Infilling: a prompt with what stands behind the answer, in the tokens of models that know it."""

from kvchat.chat.fields import Fields
from kvchat.chat.tokenizer import TextCodec

# What stands before the prompt, before the suffix, and before the answer.
_FORMS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|prefix|>", "<|suffix|>", "<|middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)


def with_suffix(
    fields: Fields, prompts: list[str | tuple[int, ...]], codec: TextCodec
) -> list[str | tuple[int, ...]]:
    """Return the prompts of a completion with its `suffix`.

    Raises ApiError for a model that has no tokens for it, and for prompts of ids.
    """
    suffix = fields.text("suffix")
    if not suffix:
        return prompts
    form = next((f for f in _FORMS if None not in map(codec.token_id, f)), None)
    if form is None:
        raise fields.fault("suffix", "needs a model with tokens for infilling")
    if fields.flag("echo") or not all(isinstance(prompt, str) for prompt in prompts):
        raise fields.fault("suffix", "goes with a prompt of text, and without echo")
    before, between, after = form
    return [f"{before}{prompt}{between}{suffix}{after}" for prompt in prompts]
