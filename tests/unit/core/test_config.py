"""Settings: sizes as people write them, and refusals that name the setting."""

import pytest

from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig
from kvchat.core.errors import ExitCode, UsageError
from kvchat.core.text import Size, format_bytes, parse_size
from kvchat.core.types import CachedTokens, SamplingParams, Timing, Usage, rate


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("2000000", 2_000_000),
        ("8G", 8 * 2**30),
        ("512M", 512 * 2**20),
        ("1.5g", 3 * 2**29),
        (" 2 KiB ", 2048),
        ("3TB", 3 * 2**40),
        ("7b", 7),
    ],
)
def test_a_size_reads_like_people_write_it(text: str, num_bytes: int) -> None:
    assert parse_size(text, "--device-cache") == Size(num_bytes=num_bytes)


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "1e9", "20 apples", "101%", "-5%", "1.2.3G", "٣G5"]
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match=r"--device-cache is .* a size like 8G"):
        parse_size(text, "--device-cache")


def test_a_number_without_its_unit_is_asked_about() -> None:
    """`--disk-cache 2` once took every conversation's KV off the disk: two bytes hold none."""
    with pytest.raises(UsageError, match="--disk-cache is 2 bytes") as caught:
        parse_size("2", "--disk-cache")
    assert caught.value.hint == "Give a unit: 2G, or 2B if bytes are meant."


def test_a_share_is_taken_of_what_is_available() -> None:
    size = parse_size("12.5%", "--device-cache")

    assert size.resolve(8000) == 1000
    assert parse_size("4K", "x").resolve(1) == 4096
    assert str(size) == "12.5%"
    assert str(parse_size("4K", "x")) == "4 KiB"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1000 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1010 * 1024, "1010 KiB"),
        (2**20 - 1, "1 MiB"),
        (5 * 2**40, "5 TiB"),
        (3000 * 2**40, "3000 TiB"),
    ],
)
def test_sizes_are_shown_in_few_digits_and_never_in_exponents(num_bytes: int, text: str) -> None:
    """From 1000 to 1023 of any unit, three significant digits once read `1e+03 KiB`."""
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ModelConfig(device="tpu"), "--device is 'tpu'"),
        (lambda: ModelConfig(dtype="int4"), "--dtype is 'int4'"),
        (lambda: ModelConfig(threads=0), "--threads is 0"),
        (lambda: CacheConfig(block_size=24), "--block-size is 24"),
        (lambda: CacheConfig(block_size=0), "--block-size is 0"),
        (lambda: CacheConfig(block_size=2048), "block-size is 2048"),
        (lambda: CacheConfig(kv_dtype="fp4"), "kv-dtype is 'fp4'"),
        (
            lambda: CacheConfig(kv_dtype="int3"),
            "auto, float32, bfloat16, float16, int8, fp8, k8v4, int4",
        ),
        (lambda: EngineConfig(max_step_tokens=0), "max-step-tokens is 0"),
        (lambda: EngineConfig(max_running=-1), "max-running is -1"),
        (lambda: SamplingParams(temperature=-0.1), "temperature is -0.1"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature is nan"),
        (lambda: SamplingParams(top_p=0.0), "top-p is 0.0"),
        (lambda: SamplingParams(top_p=1.1), "top-p is 1.1"),
        (lambda: SamplingParams(top_k=-1), "top-k is -1"),
        (lambda: SamplingParams(min_p=2.0), "min-p is 2.0"),
        (lambda: SamplingParams(repetition_penalty=0.0), "repetition-penalty is 0.0"),
    ],
)
def test_a_value_that_cannot_be_used_is_named_with_its_setting(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=message) as caught:
        build()
    assert caught.value.exit_code is ExitCode.USAGE


def test_what_was_cached_and_what_was_read_make_the_prompt() -> None:
    usage = Usage(prompt_tokens=100, cached=CachedTokens(device=60, host=5, disk=7))

    assert usage.prefilled_tokens == 28
    assert usage.as_dict()["cached_tokens"] == {"device": 60, "host": 5, "disk": 7, "total": 72}


def test_rates_of_nothing_are_zero() -> None:
    timing = Timing(ttft_s=1.0, prefill_s=2.0, decode_s=4.0, total_s=5.0)
    facts = timing.as_dict(Usage(prompt_tokens=10, completion_tokens=9))

    assert facts["prefill_tokens_per_s"] == 5.0
    assert facts["decode_tokens_per_s"] == 2.0
    assert rate(0, 1.0) == rate(5, 0.0) == rate(-1, 1.0) == 0.0
