"""Who sends a request: clients have equal shares of the engine.

All of them send one key. Behind one address of a network there is one client; programs on this
machine are told apart by the name that they send. A program could send another name each time:
that is for the machine's own user to know.
"""

from starlette.requests import HTTPConnection

from kvchat.server.guard import is_loopback

_MOST_CHARS = 200


def client_of(connection: HTTPConnection) -> str:
    """Return what stands for the client of a request or a socket; never ""."""
    address = connection.client.host if connection.client is not None else ""
    if address and not is_loopback(address):
        return address
    return f"here {connection.headers.get('user-agent', '')[:_MOST_CHARS]}"
