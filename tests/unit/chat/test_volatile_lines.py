"""Lines that are known to change: those of the agents' prompts, and none that is a rule."""

import time

import pytest

from kvchat.chat.stabiliser import is_volatile, without_billing


@pytest.mark.parametrize(
    "line",
    [
        "Working directory: /home/ada/one",
        "  Working directory: C:\\Users\\ada",
        "- Primary working directory: /home/ada",
        "Current working directory: `/a`",
        "The working directory is /home/ada/p",
        "The project base directory is: /home/ada/p",
        "I'm currently working in the directory: /home/ada",
        "Workspace: ~/p",
        "cwd: /a",
        "cwd=/a",
        "  <cwd>/home/ada</cwd>",
        "Today's date: Thu Nov 26 2026",
        "Today’s date is 2026-11-26.",
        "The current date is November 3, 2026.",
        "**Current time:** 12:00",
        "Current Date and Time: 2026-11-26T12:00:00Z",
        "Today is Monday, November 3rd",
        "<current_date>2026-11-26</current_date>",
        "Is directory a git repo: Yes",
        "  - Is a git repository: true",
        "Current branch: main",
        "Session ID: 5f0a",
    ],
)
def test_what_changes_with_the_session_the_day_or_the_directory(line: str) -> None:
    assert is_volatile(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# Environment",
        "You are an agent.",
        "Platform: linux",
        "Time is money.",
        "Today: be nice.",
        "Today is a good day.",
        "Project: write tests first.",
        "Directory listings come from the tool ls /path.",
        "Never change files outside the working directory /home/ada.",
        "Date formats: write 2026-11-26, not 26/11/2026.",
        "Current date handling is described in docs/dates.md and has 3 rules to follow.",
        "Working directory: " + "/a" * 300,
    ],
)
def test_rules_stay_where_they_are(line: str) -> None:
    assert not is_volatile(line)


BILLING = "x-anthropic-billing-header: cc_version=2.1.332.573; cc_entrypoint=sdk-cli;"


@pytest.mark.parametrize(
    ("system", "rest", "lines"),
    [
        (f"{BILLING}You are an agent.\nBe good.", "You are an agent.\nBe good.", [BILLING]),
        (f"{BILLING}\n\nYou are an agent.", "\nYou are an agent.", [BILLING]),
        (f"You are.\n{BILLING} cch=ab1\nBe.", "You are.\nBe.", [f"{BILLING} cch=ab1"]),
        (BILLING, "", [BILLING]),
        (f"Say {BILLING}", f"Say {BILLING}", []),
        ("You are an agent.", "You are an agent.", []),
    ],
)
def test_the_billing_of_another_server_is_left_out(system, rest, lines):
    assert without_billing(system) == (rest, lines)


def test_no_prompt_takes_long_to_look_through() -> None:
    began_s = time.process_time()
    for line in ("current " * 37, "the current " * 25 + ":", "- " + "working " * 37, "a" * 300):
        assert not is_volatile(line[:300])
    without_billing("x-anthropic-billing-header:" + " a=b;" * 200_000 + "a=" * 100_000)
    assert time.process_time() - began_s < 2.0
