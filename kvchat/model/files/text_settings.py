"""TextFiles: the text settings of a checkpoint, of whichever format its files are."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The text settings of a checkpoint.

    tokenizer_json      the content of tokenizer.json, or what it would be
    chat_template       Jinja source, None if the checkpoint has none
    special_tokens      strings by the template's variable name: bos_token, eos_token and so on
    stop_token_ids      the ids that end a completion, by its configuration
    sampling_defaults   the author's sampling parameters, by SamplingParams' names
    adds_bos            whether a bare prompt starts with BOS, by its tokenizer configuration
    max_context         the most tokens of a context, None if its configuration does not state it
    vocab_size          the number of ids with an embedding, None if not stated
    built               the tokenizer itself if it was built of another file's content
    """

    tokenizer_json: str
    chat_template: str | None
    special_tokens: dict[str, str] = field(default_factory=dict)
    stop_token_ids: tuple[int, ...] = ()
    sampling_defaults: dict[str, float] = field(default_factory=dict)
    adds_bos: bool = False
    max_context: int | None = None
    vocab_size: int | None = None
    built: Tokenizer | None = field(default=None, repr=False, compare=False)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Reading a large tokenizer_json takes a second.

        Raises plain Exception if it is not valid.
        """
        return Tokenizer.from_str(self.tokenizer_json) if self.built is None else self.built
