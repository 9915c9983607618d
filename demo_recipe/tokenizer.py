"""The demo pair's tokenizer and chat template: training, files, and encoding whole chats.

A byte-level BPE in which numbers from 0 to 99 are single tokens, and a template with two control
tokens a message: `<|bos|>` once, then `<|role|>text<|end|>`. Re-rendering a longer history only
ever appends. Knows nothing of networks.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_recipe.scene import Chat, Turn

BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
CONTROL_TOKENS = (PAD, BOS, END, *ROLES.values())
WORDS = Regex(r"'(?:[sdmt]|ll|ve|re)(?!\p{L})| ?\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\s+")
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}"
    "{%- for message in messages %}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{- raise_exception('unknown role: ' + message['role']) }}"
    "{%- endif %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
FIXED_SKILLS = ("fallback", "small talk")  # every reply is the same sentence
NUMBER_REPEATS = 400  # each number this often, so that the trainer merges its digits


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chat as token ids.

    is_answer  the tokens of replies, their ends included
    starts     index of each message's first token
    is_key     the tokens of replies that any good reply must have
    """

    ids: list[int]
    is_answer: list[bool]
    starts: list[int]
    is_key: list[bool]


class ChatTokenizer:
    """Text to ids and back, chats to ids; control tokens in a user's text stay plain text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.pad_id, self.bos_id, self.end_id = (self._id(token) for token in (PAD, BOS, END))
        self.role_ids = {role: self._id(token) for role, token in ROLES.items()}
        self.vocab_size = tokenizer.get_vocab_size()
        # Encoding with the control tokens unknown keeps a typed "<|end|>" harmless.
        self._plain = plain_twin(tokenizer)

    @classmethod
    def load(cls, folder: Path) -> "ChatTokenizer":
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def encode_chat(self, chat: Chat) -> Encoded:
        """Ids of a whole chat, as the chat template renders it."""
        encoded = Encoded([self.bos_id], [False], [], [False])
        turns = iter(chat.turns)
        for message in chat.messages:
            is_answer = message["role"] == "assistant"
            encoded.starts.append(len(encoded.ids))
            text = self._plain.encode(message["content"], add_special_tokens=False)
            encoded.ids.extend((self.role_ids[message["role"]], *text.ids, self.end_id))
            encoded.is_answer.extend((False, *[is_answer] * (len(text.ids) + 1)))
            keys = key_spans(next(turns)) if is_answer else []
            is_key = [any(a < end and b > start for start, end in keys) for a, b in text.offsets]
            encoded.is_key.extend((False, *is_key, False))
        return encoded

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a history that waits for the assistant's reply."""
        ids = [self.bos_id]
        for message in messages:
            ids += [self.role_ids[message["role"]], *self.encode(message["content"]), self.end_id]
        return [*ids, self.role_ids["assistant"]]

    def decode(self, ids: list[int]) -> str:
        """Text of ids, without control tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def save(self, folder: Path, max_length: int) -> None:
        """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
        }
        text = json.dumps(config, indent=2) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")

    def _id(self, token: str) -> int:
        number = self._tokenizer.token_to_id(token)
        assert number is not None, token
        return int(number)


def train_tokenizer(chats: Iterable[Chat], vocab_size: int) -> Tokenizer:
    """Train the tokenizer on the messages of these chats; the result depends on nothing else."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(chats), trainer)
    return tokenizer


def key_spans(turn: Turn) -> list[tuple[int, int]]:
    """Where in the reply the words stand that any good reply has, as character ranges."""
    if turn.skill in FIXED_SKILLS:
        return []
    if turn.skill == "sorrow":
        return [(0, len(turn.reply))]
    patterns = (pattern for group in turn.all for pattern in group)
    return [
        match.span()
        for pattern in patterns
        for match in re.finditer(pattern, turn.reply, re.IGNORECASE)
    ]


def plain_twin(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without control tokens."""
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(document))


def _texts(chats: Iterable[Chat]) -> Iterator[str]:
    for chat in chats:
        for message in chat.messages:
            yield message["content"]
    numbers = " ".join(str(number) for number in range(100))
    yield from (numbers for _ in range(NUMBER_REPEATS))
