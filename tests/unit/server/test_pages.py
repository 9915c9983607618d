"""The page that browsers get: open to all without a word of the user, and all else behind a key."""

import re
from pathlib import Path

import pytest

from kvchat.chat.html_document import digest_of
from kvchat.chat.store import SessionStore
from support.asgi_client import Got, get, post
from support.saved_sessions import save_chat
from support.served import Serve

KEY = "sesame"
BEARER = {"authorization": f"Bearer {KEY}"}
BROWSER = {"accept": "text/html,*/*"}


def test_a_browser_gets_a_page_and_a_program_health_at_the_bare_address(serve: Serve) -> None:
    app = serve(api_key=KEY)

    page, program = get(app, "/", **BROWSER), get(app, "/")

    assert page.headers["content-type"].startswith("text/html")
    assert program.json["status"] == "ok"


def test_the_policy_allows_the_pages_own_style_and_script_alone(serve: Serve) -> None:
    page = get(serve(api_key=KEY), "/", **BROWSER)

    policy, html = page.headers["content-security-policy"], page.body.decode()
    parts = [re.search(f"<{tag}>(.*?)</{tag}>", html, re.S) for tag in ("style", "script")]

    assert all(part is not None and digest_of(part[1]) in policy for part in parts)
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


@pytest.mark.parametrize("path", ["/kvchat/conversations", "/kvchat/conversations/x"])
def test_conversations_need_a_key_and_a_server_without_one_shows_none(serve, path):
    assert get(serve(api_key=KEY), path).status == 401
    refused = get(serve(), path)
    assert refused.status == 403
    assert "--api-key" in refused.json["error"]["message"]
    assert get(serve(api_key=KEY), path, **BEARER).status == 404  # it saves nothing


def test_text_is_rendered_only_for_a_server_with_the_chat_page(serve: Serve) -> None:
    assert post(serve(), "/kvchat/render", {"text": "*x*"}).status == 404
    rendered = post(serve(has_chat_page=True), "/kvchat/render", {"text": "*x* <b>"})
    assert rendered.json == {"html": "<p><em>x</em> &lt;b&gt;</p>\n"}


def test_the_page_of_another_machines_address_may_ask_with_the_key(serve: Serve) -> None:
    """A phone opens the page by this machine's name, which the guard took for another site's."""
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x"}]}

    def ask(api_key: str | None, host: str, origin: str) -> Got:
        app = serve(api_key=api_key)
        return post(app, "/v1/chat/completions", body, host=host, origin=origin, **BEARER)

    assert ask(KEY, "box.lan:8642", "http://box.lan:8642").status == 200
    assert ask(KEY, "box.lan:8642", "http://evil.example").status == 403
    assert ask(KEY, "box.lan:8642", "http://box.lan:8643").status == 403
    assert ask(KEY, "box.lan", "null").status == 403
    assert ask(None, "box.lan:8642", "http://box.lan:8642").status == 403


def test_conversations_are_listed_and_shown_with_the_key(serve: Serve, tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    session_id = save_chat(store, "What is <b>?", "*Bold*, of `HTML`.")
    app = serve(api_key=KEY, store=store)

    [listed] = get(app, "/kvchat/conversations", **BEARER).json["data"]
    shown = get(app, f"/kvchat/conversations/{listed['id']}", **BEARER)

    assert (listed["id"], listed["title"], listed["turns"]) == (session_id, "What is <b>?", 1)
    assert listed["model"] == "some model"
    assert shown.headers["content-type"] == "application/json"
    assert "What is &lt;b&gt;?" in shown.json["html"]
    assert "<em>Bold</em>" in shown.json["html"]
    assert [message["role"] for message in shown.json["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize("name", ["..%2f..%2fetc%2fpasswd", "20250102-030405-abcd", ".", "%00"])
def test_a_name_leads_to_no_other_file(serve: Serve, tmp_path: Path, name: str) -> None:
    (tmp_path / "passwd").write_text("root")
    app = serve(api_key=KEY, store=SessionStore(tmp_path))

    assert get(app, f"/kvchat/conversations/{name}", **BEARER).status == 404
