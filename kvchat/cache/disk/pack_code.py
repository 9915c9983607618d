"""Codes the images of a pack in fewer bytes, without loss.

KV consists of floating-point numbers. Their exponents are much alike and their mantissas are not:
of a bfloat16's upper byte, with the sign and most of the exponent, 3 of 8 bits are information, of
its lower byte all 8. So the upper bytes stand together and zstd compresses them, and the others
follow as they are (Hershcovitch et al., "ZipNN: Lossless Compression for AI Models", 2024).
"""

import struct

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvchat.cache.tier import DamagedRecord

# What a coded payload begins with, and the length of the compressed part.
_HEADER = struct.Struct("<4s4xQ")
_MAGIC = b"KVZ1"
# Exponents have few repeated strings, and each that is written costs more than it saves: a small
# table finds only those that are worth it, so that nearly all is Huffman's code.
_FEW_STRINGS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7
)
# No frame of ours needs a longer window; a damaged one must not ask for the memory of one.
_MOST_WINDOW_BYTES = 1 << 27


def encode(image: memoryview) -> bytes:
    """Return the code of images of 16-bit numbers little-endian."""
    numbers = np.frombuffer(image, np.uint8).reshape(-1, 2)
    compressor = zstandard.ZstdCompressor(compression_params=_FEW_STRINGS)
    compressed = compressor.compress(numbers[:, 1].tobytes())
    header = _HEADER.pack(_MAGIC, len(compressed))
    return b"".join((header, compressed, numbers[:, 0].tobytes()))


def decode(coded: memoryview, image: memoryview) -> None:
    """Write the images that `encode` was given to `image`, which is as long as they were.

    Raises DamagedRecord where `coded` is no code of that many bytes.
    """
    if len(coded) < _HEADER.size or len(image) % 2:
        raise DamagedRecord("truncated")
    magic, num_compressed = _HEADER.unpack_from(coded)
    if magic != _MAGIC:
        raise DamagedRecord("coded otherwise")
    end = _HEADER.size + num_compressed
    compressed, lower = coded[_HEADER.size : end], coded[end:]
    numbers = np.frombuffer(image, "<u2")
    if len(lower) != len(numbers):
        raise DamagedRecord("truncated")
    upper = _decompressed(compressed, len(numbers))
    # Whole numbers are written at once: each byte alone, 2 apart, takes twice as long.
    np.left_shift(upper, 8, out=numbers, dtype=np.uint16)
    np.bitwise_or(numbers, np.frombuffer(lower, np.uint8), out=numbers)


def _decompressed(compressed: memoryview, num_bytes: int) -> NDArray[np.uint8]:
    """Return exactly `num_bytes`, whatever length a damaged frame says."""
    found, end = np.empty(num_bytes, np.uint8), 0
    decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(compressed) as reader:
            while end < num_bytes and (count := reader.readinto(found[end:])):
                end += count
    except zstandard.ZstdError as error:
        raise DamagedRecord("coded otherwise") from error
    if end < num_bytes:
        raise DamagedRecord("truncated")
    return found
