"""Kinds of server programs, and a server with its model as it was found."""

from dataclasses import dataclass
from enum import StrEnum

from kvchat.remote.address import Address

# The context of a server that does not say.
LARGE_CONTEXT = 1 << 20


class Kind(StrEnum):
    """The server programs that are told apart, by the names of their projects."""

    KVCHAT = "kvchat"
    LLAMA_CPP = "llama.cpp"
    VLLM = "vLLM"
    SGLANG = "SGLang"
    TENSORRT_LLM = "TensorRT-LLM"
    TGI = "TGI"
    OLLAMA = "ollama"
    TRANSFORMERS = "transformers"
    OTHER = "OpenAI-compatible"


_ID_KINDS = frozenset({Kind.KVCHAT, Kind.LLAMA_CPP, Kind.VLLM, Kind.SGLANG})


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answered, and its model.

    model          the name that requests give the model, "" if they give none
    files          where the server says that its model's files are; "" if it does not say
    tokenizer      the digest of its tokenizer, where it is kvchat's
    variant        tells models of one name apart
    max_context    the most tokens of a context, a large number if the server does not say
    device         where it computes; "" if it does not say
    """

    address: Address
    kind: Kind
    model: str
    files: str = ""
    tokenizer: str = ""
    variant: str = ""
    max_context: int = LARGE_CONTEXT
    device: str = ""

    @property
    def knows_context(self) -> bool:
        return self.max_context < LARGE_CONTEXT

    @property
    def may_take_ids(self) -> bool:
        return self.kind in _ID_KINDS
