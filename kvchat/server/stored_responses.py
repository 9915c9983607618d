"""Stored responses: a client continues one by its id, reads it again, or deletes it.

What is kept is what the client gave and got. A continued conversation is answered as if the client
had sent all of it, so everything that holds for resent conversations holds for it.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvchat.chat.answer_memory import Fed
from kvchat.chat.deletion import Deleted
from kvchat.chat.fields import Fields, shortened
from kvchat.chat.keeping import drop_from
from kvchat.core.errors import KvchatError
from kvchat.server.api_errors import ApiError, as_api_error
from kvchat.server.bodies import Body
from kvchat.server.service import Service

_FIELD = "previous_response_id"
_PREFIX = "resp_"
# What the answer gave, and what the client gave without an id: see `_numbered`.
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})[0-9a-f]{4}|item_([0-9a-f]{24})_\d+")


class HeldResponse:
    """The last response of one connection, with all items up to its end. Its thread is the loop's.

    So a connection can continue a response that the client did not let be stored. What was sent
    for it in more than `most_bytes` is not held.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._response_id: str | None = None
        self._items: list[dict[str, Any]] = []
        self._num_bytes = 0

    def items(self, response_id: str | None) -> list[Fields] | None:
        """Return all items up to a response's end, the oldest first; None if it is not held."""
        if response_id is None or response_id != self._response_id:
            return None
        return [Fields(item, _FIELD) for item in self._items]

    def hold(self, items: list[dict[str, Any]], response: dict[str, Any], num_bytes: int) -> None:
        """Hold a complete response in place of the one before. `num_bytes` were sent for it."""
        if response[_FIELD] == self._response_id:
            num_bytes += self._num_bytes
        self.drop(self._response_id)
        if num_bytes <= self._most_bytes:
            self._response_id, self._num_bytes = response["id"], num_bytes
            self._items = [*items, *response["output"]]

    def drop(self, response_id: str | None) -> None:
        """Let go of a response if it is the one that is held."""
        if response_id == self._response_id:
            self._response_id, self._items, self._num_bytes = None, [], 0


class StoredResponses:
    """The stored responses of one service, and the handlers of their own paths."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def earlier_items(self, fields: Fields, held: HeldResponse | None = None) -> list[Fields]:
        """Return the items of all responses before a request, the oldest first.

        Raises ApiError if the request names a response that is not kept, or one whose own earlier
        responses are not kept any more.
        """
        response_id = fields.text(_FIELD)
        if response_id is None:
            return []
        if held is not None and (items := held.items(response_id)) is not None:
            return items
        found = await self._service.answering.on_encoder(lambda: self._chain(response_id))
        if found is None:
            sentence = f"Previous response with id {shortened(response_id)!r} not found."
            raise ApiError(400, sentence, _FIELD, "previous_response_not_found")
        return [Fields(item, _FIELD) for items in reversed(found) for item in items]

    async def with_items(self, fields: Body, earlier: list[Fields]) -> Body:
        """Return a request whose input has the items to which it refers in the references' places.

        Raises ApiError for an item of no stored response; one of `earlier` is there already.
        """
        given = fields.raw("input")
        if not isinstance(given, list) or not any(map(_is_reference, given)):
            return fields
        items = await self._service.answering.on_encoder(lambda: self._referred(given))
        items |= {item.text("id"): None for item in earlier if "id" in item}
        found = []
        for number, item in enumerate(given):
            if _is_reference(item):
                if item.get("id") not in items:
                    sentence = f"Item with id {shortened(str(item.get('id')))!r} not found."
                    raise ApiError(404, sentence, f"input[{number}].id", "item_not_found")
                item = items[item["id"]]
            found += [item] if item is not None else []
        return Body({**fields.values, "input": found}, fields.num_bytes)

    def _referred(self, given: list[Any]) -> dict[str | None, Any]:
        """Return the items of all stored responses to which references lead, by id."""
        matches = (_ITEM_ID.fullmatch(str(each.get("id"))) for each in given if _is_reference(each))
        response_ids = {f"resp_{match[1] or match[2]}" for match in matches if match is not None}
        items: dict[str | None, Any] = {}
        for response_id in response_ids:
            if (record := self._service.responses.find(response_id)) is not None:
                listed = _numbered(record["input"], response_id)
                items |= {item["id"]: item for item in [*listed, *record["response"]["output"]]}
        return items

    def _chain(self, response_id: str) -> list[list[dict[str, Any]]] | None:
        """Return the items of a response and of all before it, the newest first."""
        chain: list[list[dict[str, Any]]] = []
        seen: set[str] = set()
        wanted: str | None = response_id
        while wanted is not None:
            record = self._service.responses.find(wanted)
            if record is None or wanted in seen:
                return None
            seen.add(wanted)
            chain.append([*record["input"], *record["response"]["output"]])
            wanted = record["response"][_FIELD]
        return chain

    async def keep(self, given: list[dict[str, Any]], response: dict[str, Any], fed: Fed) -> None:
        """Keep a complete response, and the items that it answered; return once that is done.

        `fed` is the request that it answered.
        """
        record, service = {"input": given, "response": response}, self._service

        def put() -> None:
            service.responses.put(response["id"], record, fed)

        await service.answering.on_encoder(put)

    async def get(self, request: Request) -> Response:
        record = await self._record(request.path_params["name"])
        return JSONResponse(record["response"])

    async def _record(self, response_id: str) -> dict[str, Any]:
        """Return the record of a response; raises ApiError if there is none."""
        find = self._service.responses.find
        record = await self._service.answering.on_encoder(lambda: find(response_id))
        if record is None:
            raise _missing(response_id)
        return record

    async def input_items(self, request: Request) -> Response:
        """List the items that a response answered, the newest first unless `order` is `asc`."""
        response_id = request.path_params["name"]
        record = await self._record(response_id)
        items = _numbered(record["input"], response_id)
        return JSONResponse(_page(items, request.query_params))

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["name"]
        try:
            is_gone = await self._is_deleted(response_id)
        except KvchatError as error:
            raise as_api_error(error) from error
        if not is_gone:
            raise _missing(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _is_deleted(self, response_id: str) -> bool:
        """Delete a response everywhere: its KV, its answer, its record; false if there is none.

        KV stays that another stored response or a saved conversation has too. Raises KvchatError;
        StoreInUse while another process holds the KV, and then the record stays.
        """
        service, on_encoder = self._service, self._service.answering.on_encoder
        fed, others = await on_encoder(
            lambda: (
                service.responses.fed(response_id),
                service.responses.other_contexts(response_id),
            )
        )
        gone = Deleted()
        if fed is not None:
            gone = await asyncio.to_thread(
                service.places.delete_context, fed.token_ids, others, drop_from(service.host)
            )

        def remove() -> bool:
            if fed is not None:
                service.answering.forget(fed)
            return service.responses.remove(response_id)

        is_gone = await on_encoder(remove)
        gone.require_all("The response is deleted", "`kvchat cache clear` deletes all KV.")
        return is_gone


def item_token(response_id: str, number: int) -> str:
    """Return what makes the id of a response's item, by which the response is found again."""
    return f"{response_id.removeprefix(_PREFIX)}{number:04x}"


def _is_reference(item: Any) -> bool:
    """Whether an item stands for a stored one; such an item may have no more than the id."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or ("id" in item and len(item) == 1)


def is_stored(fields: Fields) -> bool:
    """Return whether a request lets its response be kept, as it does unless it says no."""
    return "store" not in fields or fields.flag("store")


def given_items(fields: Fields) -> list[dict[str, Any]]:
    """Return the items of a request's input; a text is a message of the user."""
    given = fields.raw("input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [item.values for item in fields.objects("input")]


def _numbered(items: list[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Return the items, each with an id; one that the client gave none has that of its place."""
    token = response_id.removeprefix(_PREFIX)
    return [_listed(item, f"item_{token}_{number}") for number, item in enumerate(items)]


def _listed(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    own = {name: value for name, value in item.items() if value is not None}
    listed = {"id": item_id, "type": "message", **own}
    content = listed.get("content")
    if listed["type"] != "message" or not isinstance(content, str):
        return listed
    kind = "output_text" if listed.get("role") == "assistant" else "input_text"
    return {**listed, "content": [{"type": kind, "text": content}]}


def _page(items: list[dict[str, Any]], asked: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a list that `order`, `after` and `limit` ask for."""
    order, limit = asked.get("order", "desc"), asked.get("limit", "20")
    if order not in ("asc", "desc"):
        raise ApiError(400, "order must be asc or desc.", "order", "invalid_value")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise ApiError(400, "limit must be 1 to 100.", "limit", "invalid_value")
    listed = items if order == "asc" else items[::-1]
    if "after" in asked:
        ids = [item["id"] for item in listed]
        if asked["after"] not in ids:
            raise ApiError(400, "after names no item of this list.", "after", "invalid_value")
        listed = listed[ids.index(asked["after"]) + 1 :]
    shown = listed[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(shown) < len(listed),
    }


def _missing(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id {shortened(response_id)!r} not found.")
