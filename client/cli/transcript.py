"""Transcripts: stories of the queue as text, played on a real store and recorded with every answer.

    # A title

    Prose: anything that does not begin with `>` or two spaces.
    > produce orders "a" "b" client=svc seq=1
      #4 t+00:00:00 Produced first_version=1 count=2
      -> WakeConsumers queue_id=1 group=default

A `>` line asks, and the indented lines below it are what came: the answer with its place in the log and its committed
time, then the effects. Playing a transcript gives the same text with the indented lines told anew, so a recorded one
is right if it comes out as it went in. Besides the commands and queries of `transcript_lines.py`:

    > open ann bob         their sessions begin
    > ann: again [label]   the same request once more, as after a lost reply; `as=label` names one
    > ann: transaction     the lines below that begin with `>>` are its items
    > +30s                 time passes; nothing is committed by that
    > restart              the node ends and opens its store again
    > snapshot             a fresh node begins with a snapshot of the state
    > failover             another node that folded the same log leads on; it must have come to the same answers
"""

from collections.abc import Iterator
from pathlib import Path

from holdfast.client.cli import transcript_lines as lines
from holdfast.client.cli.replica import Folded, Kind, Replica, content_hash, encode
from holdfast.client.cli.transcript_lines import Line, TranscriptError
from holdfast.client.cli.transcript_words import Words
from holdfast.client.protocol import commands as c
from holdfast.client.protocol.errors import Misuse
from holdfast.client.protocol.queries import DescribeQueue, Query
from holdfast.client.protocol.replies import Answer, Done, Leased, QueueDescribed, Staged
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, NO_SESSION, Columns, QueueId, SessionId, TxnId

START_MS = 1_700_000_000_000
ADMIN = "admin"  # who speaks where nobody is named and somebody must

ASKS = "> "
ITEM = ">> "
TOLD = "  "


def play(text: str, kind: Kind, directory: Path) -> Iterator[str]:
    """The lines of a transcript, played on a store of this kind in `directory`: what came stands below what was asked.

    Raises TranscriptError with the line's number. What was recorded below a question before is dropped.
    """
    player = Player(kind, directory)
    source = text.splitlines()
    at = 0
    try:
        while at < len(source):
            line = source[at]
            at += 1
            if line.startswith(TOLD):
                continue
            yield line
            if not line.startswith(ASKS):
                continue
            number, items = at, []
            while at < len(source) and source[at].startswith(ITEM):
                items.append(source[at][len(ITEM) :])
                yield source[at]
                at += 1
            try:
                told = player.ask(line[len(ASKS) :], items)
            except (ValueError, Misuse) as error:
                raise TranscriptError(f"line {number}: {line}: {error}") from error
            yield from (TOLD + each for each in told)
    finally:
        player.close()


class Player:
    """One leader at a time, the log that it wrote, and what its clients remember."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self._kind = kind
        self._directory = directory
        self._nodes = 0
        self._replica = Replica(kind, self._next_directory())
        self._words = Words(START_MS)
        self._now_ms = START_MS
        self._log: list[tuple[bytes, Folded]] = []
        self._numbers: dict[str, int] = {}
        self._sent: dict[tuple[str | None, str], c.Envelope] = {}  # by speaker and label; the last one under ""
        self._chunks: dict[tuple[TxnId, int, str], dict[int, tuple[int, bytes]]] = {}

    def ask(self, text: str, items: list[str]) -> list[str]:
        """Do what a line asks for, and tell what came of it."""
        if text.startswith("+"):
            self._now_ms += lines.duration_ms(text[1:])
            return []
        line = lines.parse(text)
        match line.verb:
            case "open":
                return self._open(line)
            case "again":
                return self._again(line)
            case "restart":
                self._replica = self._replica.reopened()
                return [f"the same store again, at entry {len(self._log)}"]
            case "snapshot":
                self._replica = self._replica.copied(self._next_directory())
                return [f"a fresh store from a snapshot, at entry {len(self._log)}"]
            case "failover":
                return self._fail_over()
            case _:
                return self._request(line, items)

    def close(self) -> None:
        self._replica.close()

    def _request(self, line: Line, items: list[str]) -> list[str]:
        label = line.option("as")
        request, done_below = line.number("request"), line.number("done")
        try:
            if line.verb == "transaction":
                line.end()
                built: c.Command | Query = lines.transaction(items, self)
            else:
                built = lines.build(line, self)
        except _NameRefused as refused:
            return self._words.answer(refused.answer)
        if isinstance(built, Query):
            return self._words.answer(self._replica.ask(built))
        envelope = self._envelope(line.speaker, built, request, done_below or 0)
        return self._send(line.speaker, label, envelope)

    def _send(self, speaker: str | None, label: str | None, envelope: c.Envelope) -> list[str]:
        self._sent[speaker, ""] = envelope
        if label is not None:
            self._sent[speaker, label] = envelope
        folded = self._commit([envelope])
        answer = folded.answers[0]
        command, reply = envelope.command, answer.reply
        if isinstance(command, c.TimeStep):
            self._now_ms += command.by_ms  # later stamps go on from there
        if isinstance(command, c.Lease) and isinstance(reply, Leased):
            answer = Answer(answer.place, self._replica.deliver(command.queue_id, reply))
        if isinstance(command, c.Stage) and isinstance(reply, Staged):
            chunks = self._chunks.setdefault((command.txn, command.part, command.attempt), {})
            chunks[command.chunk] = (command.columns.count, command.content_hash)
        return [*self._words.answer(answer), *map(self._words.effect, folded.effects)]

    def _again(self, line: Line) -> list[str]:
        label = line.words.pop(0) if line.words else ""
        line.end()
        envelope = self._sent.get((line.speaker, label))
        if envelope is None:
            raise TranscriptError("nothing was sent before by this speaker under this label")
        return self._send(line.speaker, None, envelope)

    def _open(self, line: Line) -> list[str]:
        """Sessions under which the speakers' requests are numbered; one entry for all of them."""
        speakers = line.rest()
        line.end()
        envelopes = []
        for speaker in speakers:
            self._numbers.setdefault(speaker, 0)
            envelopes.append(self._enveloped(speaker, c.OpenSession(consumer_id=speaker)))
        answers = self._commit(envelopes).answers
        refused = [answer for answer in answers if answer.reply != Done()]
        return self._words.answer((refused or answers)[0])

    def _envelope(self, speaker: str | None, command: c.Command, request: int | None, done_below: int) -> c.Envelope:
        """The next request of its speaker, or the one with the given number."""
        match command:
            case c.Touch() | c.TimeStep() | c.Stage():
                return self._enveloped(None, command)
            case c.Produce() if command.client_id is not None:
                return self._enveloped(None, command)
        speaker = speaker or ADMIN
        if request is None:
            request = self._numbers.get(speaker, 0) + 1
        self._numbers[speaker] = max(self._numbers.get(speaker, 0), request)
        return self._enveloped(speaker, command, request, done_below)

    def _enveloped(self, speaker: str | None, command: c.Command, request: int = 0, done_below: int = 0) -> c.Envelope:
        session = NO_SESSION if speaker is None else SessionId(speaker.encode().rjust(16, b"\0"))
        return c.Envelope(
            principal=LOCAL_PRINCIPAL,
            session=session,
            request_seq=request,
            done_below=done_below,
            command=command,
        )

    def _commit(self, envelopes: list[c.Envelope]) -> Folded:
        data = encode(self._now_ms, envelopes)
        folded = self._replica.fold(len(self._log) + 1, data)
        self._log.append((data, folded))
        return folded

    def _fail_over(self) -> list[str]:
        """Fold the whole log again elsewhere; every answer, every effect and the state must be the same."""
        other = Replica(self._kind, self._next_directory())
        for index, (data, folded) in enumerate(self._log, 1):
            again = other.fold(index, data)
            if again != folded:
                raise TranscriptError(f"entry {index} gave {folded} on one node and {again} on another")
        if other.digest() != self._replica.digest():
            raise TranscriptError("the same log led to different states")
        self._replica.close()
        self._replica = other
        return [f"another node folded the same {len(self._log)} entries: same answers, same digest"]

    def _next_directory(self) -> Path:
        self._nodes += 1
        return self._directory / f"node-{self._nodes}"

    # What lines refer to: transcript_lines.World

    def time_ms(self, since_start_ms: int) -> int:
        return START_MS + since_start_ms

    def queue_id(self, name: str) -> QueueId:
        answer = self._replica.ask(DescribeQueue(name=name))
        if isinstance(answer.reply, QueueDescribed):
            return answer.reply.queue_id
        raise _NameRefused(answer)

    def content_hash(self, columns: Columns, body: bytes) -> bytes:
        return content_hash(columns, body)

    def staged(self, txn: TxnId, part: int, attempt: str) -> c.Part:
        chunks = self._chunks.get((txn, part, attempt), {})
        digest = 0
        for _, hashed in chunks.values():
            digest ^= int.from_bytes(hashed[:8], "big")
        return c.Part(part, attempt, len(chunks), sum(count for count, _ in chunks.values()), digest)


class _NameRefused(Exception):
    """A queue's name could not be resolved, so there is nothing to send."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer
