"""The shell contract: streams, formats, exit codes, pipes, signals; all in whole processes."""

import json
import os
import signal
import subprocess

import pytest

from support.commands import TIMEOUT_S, Shell, objects
from support.fork_server import ForkedLife, ForkedShell

GREEDY = ("--temperature", "0", "--max-tokens", "12")
ENDLESSLY = ("--temperature", "0", "--repetition-limit", "0")


def test_the_second_turn_of_a_pipe_reads_only_what_is_new(shell: Shell, tiny: str) -> None:
    done = shell.run(
        *("-m", tiny, *GREEDY, "--input-format", "lines", "--output-format", "stream-json"),
        stdin=b"My name is Ada.\nWhat is my name?\n",
    )

    assert done.returncode == 0, done.stderr
    events = objects(done.stdout)
    assert [e["event"] for e in events if e["event"] in ("start", "end")] == ["start", "end"] * 2
    first, second = (e for e in events if e["event"] == "end")
    context = first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    assert second["usage"]["cached_tokens"]["total"] >= context - 16
    assert len(shell.sessions) == 1


def test_the_final_object_holds_what_the_contract_says(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, *GREEDY, "--json", "-p", "Hello", "--seed", "7")

    [answer] = objects(done.stdout)
    assert done.returncode == 0
    assert set(answer) == {"session", "text", "finish_reason", "usage", "timing", "model"}
    assert answer["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["cached_tokens"]["total"] + usage["prefilled_tokens"] == usage["prompt_tokens"]
    assert set(usage["cached_tokens"]) == {"device", "host", "disk", "total"}
    assert {"load_s", "ttft_s", "prefill_tokens_per_s", "decode_tokens_per_s", "total_s"} == set(
        answer["timing"]
    )
    assert {"name", "identity", "device", "dtype", "kv_dtype", "draft"} == set(answer["model"])
    assert answer["session"] == shell.sessions[0].stem


def test_text_goes_out_plain_and_ends_its_line(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, *GREEDY, stdin=b"Hello\n")

    assert done.returncode == 0
    assert done.stdout.endswith(b"\n")
    assert not {b"\x1b", b"\r", b"\x00"} & {bytes([byte]) for byte in done.stdout}


def test_continuing_takes_up_the_conversation_where_it_was_left(shell: Shell, tiny: str) -> None:
    shell.run("-m", tiny, *GREEDY, "-p", "Hello")
    [saved] = shell.sessions
    before = saved.read_bytes()

    done = shell.run("-m", tiny, *GREEDY, "-c", "--last", "--json", "-p", "More")

    [answer] = objects(done.stdout)
    assert shell.sessions == [saved]
    assert saved.read_bytes().startswith(before)
    assert answer["session"] == saved.stem
    forked = shell.run("-m", tiny, *GREEDY, "-r", saved.stem[:10], "--fork", "-p", "Else")
    assert forked.returncode == 0
    assert len(shell.sessions) == 2


def test_incognito_leaves_nothing_behind(shell: Shell, tiny: str) -> None:
    shell.run("-m", tiny, *GREEDY, "--incognito", "-p", "secret words")

    assert shell.sessions == []
    assert not [p for p in shell.home.rglob("*") if p.is_file()]


def test_json_requests_run_as_one_batch_and_carry_their_ids(shell: Shell, tiny: str) -> None:
    requests = [
        {"id": "a", "prompt": "one", "max_tokens": 3},
        {"id": 2, "messages": [{"role": "user", "content": "two"}], "temperature": 0},
        {"id": "bad", "prompt": 5},
        {"prompt": "three", "stop": ["\n"], "seed": 3},
    ]
    lines = "\n".join([*map(json.dumps, requests), "not json", ""]).encode()

    done = shell.run("-m", tiny, "--max-tokens", "8", "--input-format", "jsonl", stdin=lines)

    answers = objects(done.stdout)
    assert {a.get("id") for a in answers if "text" in a} == {"a", 2, None}
    errors = [(a["error"]["message"], a.get("id"), a.get("line")) for a in answers if "error" in a]
    assert errors == [
        ("prompt of line 3 is 5, but must be a text.", "bad", None),
        ("Line 5 of the input is not JSON.", None, 5),
    ]
    assert [a["line"] for a in answers if "text" in a and "id" not in a] == [4]
    assert done.returncode == 2
    [short] = [a for a in answers if a.get("id") == "a"]
    assert short["usage"]["completion_tokens"] <= 3


def test_a_sender_may_wait_for_an_answer_before_its_next_request(shell, tiny):
    with shell.start("-m", tiny, *GREEDY, "--input-format", "jsonl") as process:
        for number in range(2):
            process.stdin.write(json.dumps({"id": number, "prompt": "hi"}).encode() + b"\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == number
        process.stdin.close()
        assert process.wait(60) == 0


def test_samples_differ_and_share_their_prompt(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, "--max-tokens", "8", "--seed", "1", "-n", "3", "--json", "-p", "x")

    answers = objects(done.stdout)
    assert sorted(a["sample"] for a in answers) == [0, 1, 2]
    assert len({a["text"] for a in answers}) == 3
    assert (
        sum(a["usage"]["prefilled_tokens"] for a in answers) == answers[0]["usage"]["prompt_tokens"]
    )


def test_a_prompt_longer_than_the_context_loses_nothing(shell: Shell, tiny: str) -> None:
    shell.run("-m", tiny, *GREEDY, "-p", "Hello")

    done = shell.run("-m", tiny, *GREEDY, "-c", "--last", stdin=b"word " * 200)

    assert done.returncode == 4
    assert b"The prompt has" in done.stderr
    assert b"word word" in shell.sessions[0].read_bytes()
    assert shell.run("-m", tiny, *GREEDY, "-c", "--last", "-p", "short").returncode == 0


def test_invalid_bytes_on_input_are_replaced_and_reported_once(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, *GREEDY, stdin=b"caf\xe9 \xff\n")

    assert done.returncode == 0
    assert done.stderr.count(b"not valid UTF-8") == 1


def test_a_model_without_a_template_completes_and_says_so_once(shell, tmp_path_factory):
    from support.checkpoints import save_checkpoint, tiny_model

    bare = save_checkpoint(tmp_path_factory.mktemp("bare"), tiny_model("gpt2"), chat_template=None)

    done = shell.run("-m", str(bare), *GREEDY, "--input-format", "lines", stdin=b"a b c\nd\n")

    assert done.returncode == 0
    assert done.stderr.count(b"no chat template") == 1


def test_an_answer_cut_off_by_its_limit_is_no_failure(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, "--temperature", "0", "--max-tokens", "2", "-p", "Hello")

    assert done.returncode == 0
    assert b"cut off at --max-tokens" in done.stderr


def test_of_many_samples_that_are_cut_off_one_line_tells(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, "--max-tokens", "2", "-n", "3", "--json", "-p", "Hello")

    assert done.stderr.count(b"cut off at --max-tokens") == 1


def test_a_request_with_a_limit_of_its_own_is_not_at_the_end_of_the_context(shell, tiny):
    """Only the command line's limit was asked for, so a request's was taken for the context's."""
    request = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode() + b"\n"

    done = shell.run("-m", tiny, *GREEDY, "--input-format", "jsonl", stdin=request)

    assert b"kvchat: line 1: the answer was cut off after 2 tokens" in done.stderr


def test_an_answer_that_fills_the_context_says_so(shell: Shell, tiny: str) -> None:
    done = shell.run("-m", tiny, *GREEDY, "--max-context", "32", "-p", "Hello", "--stop", "@@@")

    assert b"cut off at the end of the context" in done.stderr


def test_running_out_of_time_ends_with_124_and_keeps_the_answer(shell: Shell, endless: str) -> None:
    for limit in ("2", "6", "20", "100"):  # a busy machine takes longer to load
        asked = ("--json", *ENDLESSLY, "--timeout", limit, "-p", "Hello")
        done = shell.run("-m", endless, *asked)
        if b"not loaded" not in done.stderr:
            break

    [answer] = objects(done.stdout)
    assert done.returncode == 124
    assert answer["finish_reason"] == "timeout"
    assert any(b'"finish":"timeout"' in session.read_bytes() for session in shell.sessions)


def _started_answering(shell: ForkedShell, model: str) -> ForkedLife:
    asked = (*ENDLESSLY, "--output-format", "stream-json", "-p", "Hello")
    process = shell.start("-m", model, *asked)
    process.stdin.close()
    while b"delta" not in process.stdout.readline():
        assert process.poll() is None
    return process


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose greedy answers go on to the end of a context too long to be reached."""
    from support.checkpoints import never_stopping, save_checkpoint, tiny_model

    model = never_stopping(tiny_model("llama", max_position_embeddings=1 << 17))
    return str(save_checkpoint(tmp_path_factory.mktemp("endless"), model))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_answer_and_keeps_it(shell, endless, number, code):
    process = _started_answering(shell, endless)

    process.send_signal(number)
    end = json.loads(process.stdout.read().splitlines()[-1])

    assert process.wait(60) == code
    assert end["event"] == "end"
    assert end["finish_reason"] == "cancelled"
    assert b'"finish":"cancelled"' in shell.sessions[0].read_bytes()


def test_a_killed_process_loses_at_most_a_second_of_text(shell: ForkedShell, endless: str) -> None:
    process = _started_answering(shell, endless)

    process.kill()
    process.wait(60)

    shown = shell.run("sessions", "show", shell.sessions[0].stem)
    assert shown.returncode == 0
    assert b"Hello" in shown.stdout
    assert b"cut off" in shown.stdout


def test_a_closed_pipe_ends_quietly(shell: ForkedShell, endless: str) -> None:
    process = _started_answering(shell, endless)

    process.stdout.close()

    assert process.wait(60) == 141
    assert process.stderr.read() == b""


def test_two_processes_do_not_write_to_one_session(shell: ForkedShell, endless: str) -> None:
    process = _started_answering(shell, endless)
    try:
        done = shell.run("-m", endless, "-c", "--last", "-p", "me too")
    finally:
        process.kill()
        process.wait(60)

    assert done.returncode == 6
    assert b"is open in another kvchat" in done.stderr
    assert b"--fork" in done.stderr


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_a_full_disk_is_told_and_the_answer_still_comes(shell, tiny, num_blocks):
    """It ended with 0, and a script took the conversation for saved."""
    lines = b"first message\n" + b"second " * 20 + b"\n"

    done = shell.run_on_full_disk(
        num_blocks, "-m", tiny, *GREEDY, "--input-format", "lines", stdin=lines
    )

    assert done.returncode == 6, done.stderr
    assert done.stdout.count(b"\n") >= 2
    assert done.stderr.count(b"cannot be saved") == 1
    assert len(shell.sessions) == num_blocks  # one that is not even begun leaves no file


@pytest.mark.parametrize("command", ["/new", "/resume Ships"])
def test_a_conversation_that_a_command_left_unsaved_is_in_the_exit_code(shell, tiny, command):
    """Only the last conversation of a script counted: after /new it ended with 0."""
    shell.run("-m", tiny, *GREEDY, "--title", "Ships", "-p", "one")
    lines = f"first message\n{'second ' * 20}\n{command}\n"

    done = shell.run_on_full_disk(
        0, "-m", tiny, *GREEDY, "--input-format", "lines", stdin=lines.encode()
    )

    assert done.returncode == 6, done.stderr
    assert b"cannot be saved" in done.stderr


def test_a_quiet_one_shot_that_cannot_be_saved_says_so_once(shell: Shell, tiny: str) -> None:
    done = shell.run_on_full_disk(0, "-m", tiny, *GREEDY, "--quiet", "-p", "Hello")

    assert done.returncode == 6, done.stderr
    assert done.stdout.endswith(b"\n")
    assert done.stderr.count(b"cannot be saved") == done.stderr.count(b"\n") == 1


def test_an_import_that_finds_the_disk_full_says_so_and_leaves_nothing(shell: Shell) -> None:
    """It printed the id of a conversation that was not there."""
    messages = json.dumps([{"role": "user", "content": "Hello " * 400}])
    (shell.home / "chat.json").write_text(messages)
    for num_blocks in (0, 1):
        done = shell.run_on_full_disk(num_blocks, "sessions", "import", "chat.json")

        assert done.returncode == 6
        assert done.stdout == b""
        assert b"chat.json is not imported" in done.stderr
        assert shell.sessions == []


def test_no_terminal_and_no_input_is_a_usage_error_at_once(shell: Shell) -> None:
    with open(os.devnull, "rb") as nothing:
        done = subprocess.run(
            shell.command(),
            stdin=nothing,
            env=shell.environment,
            capture_output=True,
            timeout=TIMEOUT_S,
        )

    assert done.returncode == 2
    assert done.stdout == b""
    assert b"input is empty" in done.stderr


def test_a_script_is_told_why_something_was_read_again(shell: Shell, tiny: str) -> None:
    shell.run("-m", tiny, *GREEDY, "-p", "Tell me of ships. " * 20)

    elsewhere = ("--cache-dir", str(shell.home / "elsewhere"))
    asked = ("-c", "--last", *elsewhere, "--json", "--stats", "-p", "And then?")
    done = shell.patient.run("-m", tiny, *GREEDY, *asked)

    [answer] = objects(done.stdout)
    assert answer["read_again"] == "not written before the last run ended"
    assert b" | read again: not written before the last run ended\n" in done.stderr
