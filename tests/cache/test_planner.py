"""Restore or recompute: decided by measured rates, and by nothing while there are none."""

from kvchat.cache.planner import RestorePlanner

MIB = 1 << 20


def test_without_measurements_a_restore_is_tried_and_waited_for() -> None:
    planner = RestorePlanner()

    assert planner.is_worth(16, 1 << 40)
    assert planner.patience_s(4096) > 30.0


def test_a_quick_disk_beats_a_slow_processor_and_a_slow_disk_does_not() -> None:
    planner = RestorePlanner()
    planner.note_prefill(1000, 2.0)  # 500 tokens a second

    planner.note_read(1000 * MIB, 1.0)
    assert planner.is_worth(1000, 12 * MIB)

    for _ in range(30):
        planner.note_read(MIB, 1.0)  # throttled to 1 MiB a second
    assert not planner.is_worth(1000, 12 * MIB)


def test_what_is_too_small_to_tell_anything_is_not_measured() -> None:
    planner = RestorePlanner()

    planner.note_prefill(1, 0.001)
    planner.note_read(100, 10.0)
    planner.note_prefill(1000, 0.0)

    assert planner.prefill_tokens_per_s is None
    assert planner.read_bytes_per_s is None


def test_patience_is_what_computing_would_take() -> None:
    planner = RestorePlanner()
    planner.note_prefill(1000, 2.0)

    assert planner.patience_s(5000) == 10.0
    assert 0 < planner.patience_s(1) < 1


def test_rates_follow_a_machine_that_changes_its_mind() -> None:
    planner = RestorePlanner()
    planner.note_prefill(1000, 1.0)
    for _ in range(20):
        planner.note_prefill(1000, 4.0)

    assert planner.prefill_tokens_per_s is not None
    assert 250 <= planner.prefill_tokens_per_s < 255


def test_nobody_waits_long_where_no_rate_is_known() -> None:
    """A first question waited until gigabytes of weights were read, to learn whose KV to use."""
    assert RestorePlanner().patience_s(20) < 1.0


def test_a_disk_that_was_slow_once_is_tried_again() -> None:
    """What is not read is not measured: after one stall nothing was ever restored again."""
    planner = RestorePlanner()
    planner.note_prefill(1000, 1.0)
    planner.note_read(1 << 20, 10.0)
    num_refused = 0
    while not planner.is_worth(1000, 1 << 20):
        planner.note_refused()
        num_refused += 1

    assert 5 < num_refused < 50
