"""A shell asks kvchat what may follow on the command line."""

from support.commands import Shell


def test_a_shell_can_complete_commands_and_flags(shell: Shell) -> None:
    def completed(words: str) -> set[str]:
        asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = shell.run(_KVCHAT_COMPLETE="complete_bash", **asked)
        assert done.stderr == b""
        return set(done.stdout.decode().split())

    assert completed("kvchat se") == {"serve", "sessions"}
    assert {"export", "import", "show"} <= completed("kvchat sessions ")
    others = {"--temperature", "--think", "--threads", "--timeout", "--title"}
    others |= {"--tool-env", "--tools", "--top-k", "--top-p", "--trace-log"}
    assert completed("kvchat --t") == others
    assert {"trace", "plan"} <= completed("kvchat bench ")
