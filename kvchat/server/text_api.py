"""The model's text side for chats on this machine: they read neither tokenizer nor template."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.fields import FieldFault
from kvchat.chat.served_text import text_answer, text_facts
from kvchat.core.errors import KvchatError
from kvchat.server.api_errors import ApiError
from kvchat.server.bodies import read_request
from kvchat.server.service import Service


class TextApi:
    """The handlers of one service. Questions are answered on the encoder's thread."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def facts(self, request: Request) -> Response:
        """Say what is served, how it is, and what a chat has to know of the model's text side."""
        host = self._service.host
        try:
            facts = text_facts(host.model)
        except KvchatError as error:
            raise ApiError(404, error.message) from error
        about = {
            "status": str(host.health),
            "model": self._service.name,
            "files": self._service.files,
            "device": host.ready.device if host.ready is not None else "",
            "context_length": host.ready.context_limit if host.ready is not None else None,
        }
        return JSONResponse({**about, "text": facts})

    async def answer(self, request: Request) -> Response:
        """Answer a question; a tokenizer or template that fails is told as it is."""
        fields = await read_request(request)
        model, name = self._service.host.model, fields.text("question") or ""
        given = fields.nested("given").values
        try:
            answer = await self._service.answering.on_encoder(
                lambda: text_answer(model, name, given)
            )
        except FieldFault:
            raise
        except KvchatError as error:
            return JSONResponse({"failed": error.message, "hint": error.hint})
        return JSONResponse({"answer": answer})
