"""FarProxy: a TCP proxy that makes a server far away, slow or unreachable.

It stands for `tc netem`, which not every kernel has.
"""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

_PIECE = 1 << 14


class FarProxy:
    """Carries bytes between clients of `port` and a server of this machine.

    delay_s          how long each piece is under way, in either direction; as many as come at once
    bytes_per_s      what a connection carries in a second, in either direction; 0: no limit
    is_partitioned   nothing arrives any more, and no connection is closed
    num_pieces       pieces that clients sent
    server_port      where new connections go
    """

    def __init__(self, server_port: int) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.is_partitioned = False
        self.num_pieces = 0
        self.port = 0
        self.server_port = server_port
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._is_ready.wait(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._is_over = asyncio.Event()
        server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._is_ready.set()
        await self._is_over.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.server_port)
            with suppress(asyncio.CancelledError):
                await asyncio.gather(
                    self._one_way(reader, far_writer, True), self._one_way(far_reader, writer)
                )
            far_writer.close()
        writer.close()
        self._tasks.discard(task)

    async def _one_way(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_sent: bool = False
    ) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        arriving = asyncio.create_task(self._arrive(under_way, writer))
        try:
            while piece := await reader.read(_PIECE):
                self.num_pieces += is_sent
                under_way.put_nowait((self._loop.time() + self.delay_s, piece))
                if self.bytes_per_s:
                    await asyncio.sleep(len(piece) / self.bytes_per_s)
        finally:
            under_way.put_nowait((0.0, b""))
            await arriving

    async def _arrive(
        self, under_way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        while (piece := await under_way.get())[1]:
            await asyncio.sleep(max(0.0, piece[0] - self._loop.time()))
            if not self.is_partitioned:
                with suppress(OSError):
                    writer.write(piece[1])
                    await writer.drain()
        writer.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(10)
        self._loop.close()


@contextmanager
def far_from(server_port: int) -> Iterator[FarProxy]:
    """Yield a proxy of a server, as near as the server itself at first."""
    with closing(FarProxy(server_port)) as proxy:
        yield proxy
