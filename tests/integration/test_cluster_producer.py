"""Three real nodes under a managed producer with a full window: leaders go, no message is lost, doubled or moved."""

from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread

import pytest

from holdfast.client.blocking_producer import Producer
from tests.support.processes import Processes, cluster, until

WINDOW = 200


class Feed:
    """Sends numbered messages without end, as fast as the window lets it; a context manager that flushes."""

    def __init__(self, producer: Producer) -> None:
        self.futures: list[Future[int]] = []
        self._producer = producer
        self._end = Event()
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._run)

    def __enter__(self) -> "Feed":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._producer.flush()
        if self._failure is not None:
            raise self._failure

    def progress(self, count: int) -> None:
        """So many more messages than now are confirmed."""
        wanted = len(self.futures) + count
        until(lambda: len(self.futures) > wanted and self.futures[wanted].done(), f"{count} more messages")

    def _run(self) -> None:
        try:
            while not self._end.is_set():
                self.futures.append(self._producer.send_nowait(b"%d" % len(self.futures)))
        except BaseException as error:
            self._failure = error


@pytest.mark.slow
@pytest.mark.parametrize("durable", [False, True])
def test_leaders_that_go_under_a_full_window_cost_no_message_and_no_order(tmp_path: Path, durable: bool) -> None:
    """P1, as the client does it."""
    with cluster(tmp_path / "nodes") as processes, processes.client() as client:
        client.create_queue("q")
        outbox = tmp_path / "outbox" if durable else None
        with client.producer("q", client_id="svc", window=WINDOW, outbox=outbox) as producer:
            with Feed(producer) as feed:
                for blow in ("kill", "pause", "kill"):
                    feed.progress(2 * WINDOW)
                    strike(processes, blow, feed)
            versions = [future.result(0) for future in feed.futures]
        stored = list(client.read("q"))
        assert versions == list(range(1, len(feed.futures) + 1))
        assert [message.payload for message in stored] == [b"%d" % n for n in range(len(feed.futures))]
        assert client.producer_state("q", client_id="svc").high_water == len(feed.futures)


def strike(processes: Processes, blow: str, feed: Feed) -> None:
    leader = processes.leader()
    if blow == "kill":
        processes.kill(leader)
        feed.progress(2 * WINDOW)
        processes.start(leader)
    else:
        processes.pause(leader)
        feed.progress(2 * WINDOW)
        processes.resume(leader)
    processes.formed()
