"""Scripts: an answer of which there is nothing but thinking is a failure, and is told."""

import io

import pytest

from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.controller import ChatController
from kvchat.chat.host import ChatHost
from kvchat.cli.output import Notices, TextWriter
from kvchat.cli.script import Script, ScriptSetup
from kvchat.cli.streams import Interruption
from support.scripted_engine import Script as Answer
from support.scripted_engine import scripted_build


@pytest.mark.parametrize("is_quiet", [False, True])
@pytest.mark.parametrize(
    ("said", "most", "stdout", "stderr", "code"),
    [
        ("<think>so", None, "", "The model ended within its thinking", 1),
        ("<think>so so so", 8, "", "The model was still thinking", 1),
        ("<think>so</think>yes", None, "yes\n", "", 0),
        ("<think>so</think>yes", 22, "yes\n", "", 0),
        ("", None, "", "the answer is empty", 0),
    ],
)
def test_an_empty_output_is_never_silent(model, said, most, stdout, stderr, code, is_quiet):
    """A script that took the output for the answer went on with nothing, and exit code 0."""
    host = ChatHost(model, scripted_build(model, lambda *_: Answer(said)), None)
    controller = ChatController(host, lambda *_: host, None, AskOptions(max_tokens=most))
    out, err = io.StringIO(), io.StringIO()
    setup = ScriptSetup(controller, TextWriter(out, is_raw=False), Notices(is_quiet, err))
    with Interruption() as interruption:
        script = Script(setup, interruption)
        script.answer("x")
    controller.close_session()
    host.close()

    assert out.getvalue().strip("\n") == stdout.strip("\n")
    assert script.exit_code == code
    if code or not is_quiet:
        assert stderr in err.getvalue()
    if not stderr:
        assert "think" not in err.getvalue()
