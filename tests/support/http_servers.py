"""Servers on threads of the test's own process, in contexts."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import BaseServer

import uvicorn

_PATIENCE_S = 60.0


@contextmanager
def serving(server: BaseServer) -> Iterator[str]:
    """Have a server answer in this context; yield its address."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving_app(config: uvicorn.Config) -> Iterator[tuple[uvicorn.Server, int]]:
    """Serve an application at a free port in this context; yield the server and the port."""
    server, bound = uvicorn.Server(config), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([bound],), daemon=True)
    thread.start()
    try:
        yield server, bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(_PATIENCE_S)
        bound.close()
        assert not thread.is_alive(), "the server does not end"
