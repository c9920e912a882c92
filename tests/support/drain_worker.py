"""A worker process whose handler waits for the file `go`: `drain_worker.py SHELL ADDRESS FOLDER`."""

import signal
import sys
import time
from pathlib import Path
from typing import Any

import anyio

from holdfast.client import aio, blocking
from holdfast.client.worker import Worker

WAIT_S = 60.0
OPTIONS: dict[str, Any] = {"concurrency": 1, "prefetch": 4}


def main(shell: str, address: str, folder: Path) -> None:
    def handle(message: object) -> None:
        (folder / "begun").touch()
        end_s = time.monotonic() + WAIT_S
        while not (folder / "go").exists() and time.monotonic() < end_s:
            time.sleep(0.02)  # between two looks

    async def run() -> None:
        async with aio.Client(address, timeout_ms=10_000) as client:
            await Worker(client, "orders", handle, **OPTIONS).run()

    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    if shell == "threads":
        with blocking.Client(address, timeout_ms=10_000) as client:
            Worker(client, "orders", handle, **OPTIONS).run()
    else:
        anyio.run(run, backend=shell)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    (folder / "ended").touch()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
