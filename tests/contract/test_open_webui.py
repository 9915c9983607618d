"""Requests as Open WebUI sends them, to `kvchat serve` with the demo pair.

Open WebUI resends the whole conversation as text, streams the answer and asks for its usage. After
an answer it sends requests of its own, which are not streamed and share no beginning with the
conversation: for a title, for tags, and for questions that could follow. "Regenerate" sends the
conversation without its last answer. The words of these requests here are our own.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.fork_server import ForkedShell, ForkServer
from support.server_process import ServerProcess, served

CHAT = "/v1/chat/completions"
SYSTEM = "You are a helpful assistant. Today is Tuesday, 2026-11-24. The user's name is Ada."
QUESTIONS = (
    "My dog is called Rex.",
    "What is my dog called?",
    "My favourite colour is green.",
    "What can you do?",
    "Tell me about the cache.",
    "What is my favourite colour?",
)
TASKS = (
    "### Task:\nWrite a title of 3 to 5 words for this chat, with an emoji.",
    "### Task:\nName 1 to 3 broad tags for this chat.",
    "### Task:\nSuggest 3 to 5 questions that the user could ask next.",
)
FORM = '### Output:\nJSON: { "%s": "..." }\n### Chat History:\n<chat_history>\n%s\n</chat_history>'
# Tokens of the context that may be read again: less than a block, and the mark of the answer's end.
SLACK = 16


@dataclass
class Page:
    """One conversation as the web page keeps it. `known` tokens of it the server has computed."""

    server: ServerProcess
    messages: list[dict[str, str]] = field(
        default_factory=lambda: [{"role": "system", "content": SYSTEM}]
    )
    known: int = 0

    def ask(self, question: str) -> int:
        """Send another message; return how many tokens were computed beyond the new ones."""
        self.messages.append({"role": "user", "content": question})
        return self._answer()

    def regenerate(self) -> int:
        self.messages.pop()
        return self._answer()

    def _answer(self) -> int:
        body = {
            "stream": True,
            "model": "demo",
            "messages": self.messages,
            "stream_options": {"include_usage": True},
            "max_tokens": 40,
            "temperature": 0,
        }
        documents = self.server.stream(CHAT, body)
        choices = [choice for document in documents for choice in document["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        usage = documents[-1]["usage"]
        self.messages.append({"role": "assistant", "content": text})
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        num_new = max(0, usage["prompt_tokens"] - self.known)
        self.known = usage["prompt_tokens"] + usage["completion_tokens"]
        return int(usage["prompt_tokens"] - cached - num_new)

    def run_tasks(self) -> None:
        """Send the page's own requests on this chat."""
        history = "\n".join(f"{m['role'].upper()}: {m['content']}" for m in self.messages[-6:])
        for task, name in zip(TASKS, ("title", "tags", "follow_ups"), strict=True):
            content = f"{task}\n{FORM % (name, history)}"
            body: dict[str, Any] = {
                "model": "demo",
                "messages": [{"role": "user", "content": content}],
                "stream": False,
                "max_completion_tokens": 30,
            }
            [choice] = self.server.fetch(CHAT, body)["choices"]
            assert choice["message"]["role"] == "assistant"


@pytest.fixture
def shell(tmp_path: Path, fork_server: ForkServer) -> ForkedShell:
    return ForkedShell(tmp_path, server=fork_server).patient


def test_a_page_reads_only_what_is_new_also_after_a_kill(shell: ForkedShell) -> None:
    with served(shell, "-m", "demo") as server:
        assert "demo" in [model["id"] for model in server.fetch("/v1/models")["data"]]
        page = Page(server)
        page.ask(QUESTIONS[0])
        page.run_tasks()
        beyond = [page.regenerate()]
        for question in QUESTIONS[1:3]:
            beyond.append(page.ask(question))
            page.run_tasks()
    with served(shell, "-m", "demo") as server:
        page.server = server
        after_kill = page.ask(QUESTIONS[3])
        page.run_tasks()
        beyond += [page.ask(question) for question in QUESTIONS[4:]]
        beyond.append(page.regenerate())

    assert max(beyond) <= SLACK, beyond
    assert after_kill <= SLACK


def test_the_pages_own_requests_do_not_push_the_chat_out(shell: ForkedShell) -> None:
    """The device holds one long context; each request of the page's own needs a part of it."""
    with served(shell, "-m", "demo", "--device-cache", "64MB") as server:
        page = Page(server)
        page.ask(QUESTIONS[0])
        for _ in range(4):
            page.run_tasks()
        assert page.ask(QUESTIONS[1]) <= SLACK
