"""The page that the server gives a browser: saved conversations to read, and a chat with --web.

Conversations are listed by a server with a key only. The page is one document with its style and
script in it, and its policy allows no others.
"""

import asyncio
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from kvchat.chat.html_document import conversation_html, digest_of, page_style
from kvchat.chat.html_text import PageText
from kvchat.chat.json_requests import to_messages
from kvchat.chat.store import SessionStore
from kvchat.core.errors import KvchatError, SessionNotFound
from kvchat.core.text import model_label, one_line
from kvchat.server.api_errors import ApiError, as_api_error
from kvchat.server.bodies import Worker, read_request

_POLICY = (
    "default-src 'none'; style-src '{style}'; script-src '{script}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_MOST_TITLE_CHARS = 200


@dataclass(frozen=True)
class PagesApi:
    """The handlers of the pages of one server.

    store      the saved conversations; None where nothing is saved
    has_key    whether requests need a key: without one no conversation is shown
    has_chat   whether the page has a chat
    """

    store: SessionStore | None
    has_key: bool
    has_chat: bool

    async def page(self, request: Request) -> Response:
        """Return the page itself, which has nothing of the user in it and needs no key."""
        html, headers = self._page
        return HTMLResponse(html, headers=headers)

    @cached_property
    def _page(self) -> tuple[str, dict[str, str]]:
        folder = files("kvchat.server").joinpath("pages")
        page, own_style, script = (
            folder.joinpath(f"page.{kind}").read_text(encoding="utf-8")
            for kind in ("html", "css", "js")
        )
        style = page_style() + own_style
        html = page.format(style=style, script=script, has_chat="yes" if self.has_chat else "no")
        return html, {
            "Content-Security-Policy": _POLICY.format(
                style=digest_of(style), script=digest_of(script)
            ),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }

    async def conversations(self, request: Request) -> Response:
        """List the saved conversations, the most recently changed first."""
        summaries = await asyncio.to_thread(self._allowed_store().summaries)
        data = [
            {
                "id": summary.session_id,
                "title": one_line(summary.title, _MOST_TITLE_CHARS),
                "turns": summary.num_turns,
                "model": model_label(summary.model) if summary.model else "",
                "modified": summary.modified_s,
            }
            for summary in summaries
            if summary.is_readable and (summary.num_turns or summary.title)
        ]
        return JSONResponse({"data": data}, headers={"Cache-Control": "no-store"})

    async def conversation(self, request: Request) -> Response:
        """Return one conversation: as HTML, and the messages on the path to its tip."""
        store, session_id = self._allowed_store(), request.path_params["name"]

        def read() -> dict[str, object]:
            found = store.read(session_id)
            html = conversation_html(found.conversation, model_label(found.model))
            return {"html": html, "messages": to_messages(found.conversation)}

        try:
            content = await _renderer().run(read)
        except SessionNotFound as error:
            raise ApiError(404, str(error)) from error
        except KvchatError as error:
            raise as_api_error(error) from error
        return JSONResponse(content, headers={"Cache-Control": "no-store"})

    async def render(self, request: Request) -> Response:
        """Return the Markdown `text` as HTML."""
        fields = await read_request(request)
        text = fields.text("text") or ""
        html = await _renderer().run(lambda: PageText().from_markdown(text))
        return JSONResponse({"html": html})

    def _allowed_store(self) -> SessionStore:
        if not self.has_key:
            raise ApiError(403, "Conversations are shown by a server with a key only: --api-key.")
        if self.store is None:
            raise ApiError(404, "This server saves no conversations.")
        return self.store


@cache
def _renderer() -> Worker:
    """Return the thread that writes HTML; it starts with the first.

    That is work of Python alone, seconds of it for a long conversation: with several threads at it
    the streams of answers would wait longer for their turns.
    """
    return Worker("kvchat-pages")
