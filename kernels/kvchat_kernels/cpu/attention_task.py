"""What attention's kernels work on: tasks, parts of contexts, and the form of the code."""

from dataclasses import dataclass
from enum import auto

from kvchat_kernels.cpu.attention_reading import HeadNumbers
from kvchat_kernels.cpu.bfloat_pairs import PAIR_LANES, are_pairs_multiplied
from kvchat_kernels.cpu.features import has_512_bits
from kvchat_kernels.cpu.maths import Stored
from kvchat_kernels.cpu.task import Memory, Place, Task
from kvchat_kernels.kv_code import KvCode

# Slots of a part.
PART = 256
# Rows of a job, for whose scores there is room on a thread's stack.
JOB_ROWS = 16


class Job(Place):
    """A part of a context: 64-bit numbers.

    ROW, NUM_ROWS   the sequence's rows of the step
    START           a multiple of PART, at most PART slots before END
    FIRST, END      the slots that any of the rows sees of the part, none of them empty
    TABLE           address of the sequence's block table, int32
    RESULT          number of the first row's result of this part; the other rows' follow
    """

    ROW = auto()
    NUM_ROWS = auto()
    START = auto()
    FIRST = auto()
    END = auto()
    TABLE = auto()
    RESULT = auto()


class Record(Place):
    """What layers that see the same slots have in common: addresses, renewed for every step.

    JOBS              [jobs, numbers of a Job] int64
    FIRST, END        [rows] int64: each row sees slots FIRST to END - 1, but for empty ones
    RESULTS           [rows] int64: number of a row's first result
    STRIDES, COUNTS   [rows] int64: how far apart a row's results are, and how many they are
    SUMS, STATS       float32 [results, heads, value dim] and [results, heads, 2]
    """

    JOBS = auto()
    FIRST = auto()
    END = auto()
    RESULTS = auto()
    STRIDES = auto()
    COUNTS = auto()
    SUMS = auto()
    STATS = auto()


class AttentionTask(Task):
    """The task of both kernels.

    record         the numbers of a Record, int64
    query          float32 [rows, heads, key dim] with `query_stride` bytes to a row
    keys, values   the pools, [slots, KV heads, dim]
    scale          what scores are multiplied with
    softcap        where the form has one
    sinks          float32 [heads], where the form has them
    out            float32 [rows, heads, value dim]
    key_scales, value_scales
                   bfloat16 [slots, KV heads, dim / group], where the pools have a code
    """

    record: Memory
    query: Memory
    query_stride: int
    keys: Memory
    values: Memory
    scale: float
    softcap: float = 0.0
    sinks: Memory | None = None
    out: Memory
    key_scales: Memory | None = None
    value_scales: Memory | None = None


class ScoresRecord(Place):
    """What slots get of the rows of the only sequence: addresses and sizes, renewed for every step.

    SUMS, HIGHEST   float32 [runs of JOB_ROWS rows, NUM_HEADS, NUM_SLOTS]: a slot's weights, added
                    over rows, and the largest: their mean, or largest, over a KV head's query heads
    NUM_HEADS       the KV heads of all layers that are scored
    NUM_SLOTS       how many slots are scored, the first ones
    """

    SUMS = auto()
    HIGHEST = auto()
    NUM_HEADS = auto()
    NUM_SLOTS = auto()


class SlotScoresTask(AttentionTask):
    """The task of the kernels that score slots, once a layer's parts are attended.

    slot_scores   the numbers of a ScoresRecord, int64
    first_head    which of its heads the layer's first is
    totals        float32 [rows, heads, 2]: a row's largest score, and 1 over the sum of its weights
    """

    slot_scores: Memory
    first_head: int
    totals: Memory


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """What code is made for. `block_size` is a power of two, dims are multiples of 8.

    Pools hold floats, as `stored`, or numbers of a code, whose groups are powers of two from 8 on.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    stored: Stored | KvCode
    has_softcap: bool = False
    has_sinks: bool = False

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def in_pairs(self) -> bool:
        """Whether queries and weights are rounded to bfloat16, and multiplied two at a time with
        the pools' numbers. Sums are float32.
        """
        has_runs = self.key_dim % PAIR_LANES == self.value_dim % (2 * PAIR_LANES) == 0
        return self.stored is Stored.BFLOAT and has_runs and are_pairs_multiplied()

    @property
    def in_bytes(self) -> bool:
        """Whether queries and weights are rounded to 16 bits, and multiplied with the pools' whole
        numbers of 8 or 4 bits: keys as bytes, values as 16 bits.
        """
        return has_512_bits() and all(numbers.has_bytes for numbers in self.numbers)

    @property
    def numbers(self) -> tuple[HeadNumbers, HeadNumbers]:
        """How keys and values lie in their pools."""
        own = self.stored
        keys, values = (own.keys, own.values) if isinstance(own, KvCode) else (own, own)
        return HeadNumbers(keys, self.key_dim), HeadNumbers(values, self.value_dim)
