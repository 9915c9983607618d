"""A conversation as a page: every branch is in it, and nothing in it runs, loads or hides."""

import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from kvchat.chat import html_text
from kvchat.chat.conversation import Conversation, Role
from kvchat.chat.html_document import digest_of, to_html
from kvchat.chat.html_text import PageText
from kvchat.core.types import FinishReason
from support.turns import branching_conversation, turn

HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[x](javascript:alert(1))",
    "[x](data:text/html;base64,PHNjcmlwdD4=)",
    "[x](file:///etc/passwd)",
    "![x](http://evil.example/pixel.png)",
    '[x](http://e.example/" onmouseover="alert(1))',
    '```"><script>\nalert(1)\n```',
    "<javascript:alert(1)>",
    "| a |\n|:-:|\n| <b>x</b> |",
)


class Elements(HTMLParser):
    """Collects the tags of a page with their attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_brings_a_script_a_picture_or_another_scheme(text: str) -> None:
    conversation = Conversation("id", 0.0, system=text)
    conversation.add(turn(1, text=text))
    conversation.add(turn(2, 1, Role.ASSISTANT, text, finish=FinishReason.STOP))
    conversation.title = text

    found = Elements(to_html(conversation, text)).found

    tags = {tag for tag, _ in found}
    assert not tags & {"script", "img", "iframe", "object", "b", "link", "base", "form"}
    for tag, attributes in found:
        assert not any(name.startswith("on") or name == "style" for name in attributes), tag
        assert (attributes.get("href") or "http://").startswith(("http://", "https://"))


def test_the_policy_of_a_page_allows_its_own_style_alone() -> None:
    html = to_html(branching_conversation())

    style = re.search(r"<style>(.*?)</style>", html, re.S)

    assert style is not None
    assert f"default-src 'none'; style-src '{digest_of(style[1])}'" in html
    assert "prefers-color-scheme: dark" in style[1]


def test_other_branches_are_folded_and_the_path_to_the_tip_is_open() -> None:
    conversation = branching_conversation()
    texts = ["question", "text of 2", "text of 3", "text of 4", "surrogate", "text of 6"]
    on_path = {"question", "text of 2", "text of 3"}

    html = to_html(conversation)

    unfolded = html
    while "<details" in unfolded:
        unfolded = re.sub(r"<details(?:(?!<details).)*?</details>", "", unfolded, flags=re.S)
    assert all(text in html for text in texts)
    assert {text for text in texts if text in unfolded} == on_path
    assert html.count("<details") == html.count("</details>") > 0


def test_a_conversation_deeper_than_pythons_stack_is_written() -> None:
    conversation = Conversation("id", 0.0)
    for number in range(1, 3000, 2):
        conversation.add(turn(number, number - 1, text=f"question {number}"))
        conversation.add(turn(number + 1, number, Role.ASSISTANT, "a", finish=FinishReason.STOP))
        conversation.move_tip(number)  # the next question starts a branch of its own

    assert "question 2999" in to_html(conversation)


def test_code_is_coloured_and_keeps_every_character() -> None:
    html = PageText().from_markdown("```python\ndef f(a): return a < 1  # so\n```")

    assert '<span class="keyword">def</span>' in html
    assert re.sub("<[^>]*>", "", html).strip() == "def f(a): return a &lt; 1  # so"
    assert (
        PageText().from_code("x" * 60_000, "python") == f"<pre><code>{'x' * 60_000}</code></pre>\n"
    )


class EndlessLexer:
    """A lexer that never ends, and counts the codes that it was given."""

    num_codes = 0

    def get_tokens_unprocessed(self, text: str) -> Iterator[tuple[int, object, str]]:
        self.num_codes += 1
        while True:
            re.fullmatch("(?:a|aa)+b", "a" * 15)
        yield 0, None, text


def test_all_code_of_a_page_shares_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block had a second of its own, so a page of a thousand took many minutes."""
    lexer = EndlessLexer()
    monkeypatch.setattr(html_text, "find_lexer", lambda language: lexer)
    page = PageText(lexing_s=0.05)

    html = page.from_markdown("```slow\na < b\n```\n\n" * 3) + page.from_code("a < b", "slow")

    assert lexer.num_codes == 1
    assert html.count("a &lt; b") == 4


def test_a_text_that_markdown_would_read_for_long_is_shown_as_it_is() -> None:
    assert PageText().from_markdown("*a " * 100_000).startswith('<p class="plain">*a *a')


@pytest.mark.parametrize(
    "text",
    ["[" * 20_000, "![" * 10_000, ">" * 100 + "\n" + "a\n" * 2000, "<![CDATA[" * 2000],
    ids=["brackets", "pictures", "lines of a quote", "data"],
)
def test_a_text_whose_cost_grows_with_its_square_is_given_up(text, monkeypatch):
    """The reader took minutes for 200,000 brackets, at the cost of the answers beside it."""
    monkeypatch.setattr(html_text, "_SPARE_S", 0.02)
    monkeypatch.setattr(html_text, "_SECONDS_PER_CHAR", 0.0)

    assert PageText().from_markdown(text).startswith('<p class="plain">')
