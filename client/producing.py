"""The managed producer without its sockets and its disk: what is sent when, under which numbers, who is told what.

Decides and touches nothing: time comes as `now_s`, and `take_actions` says what is to be done. P1 to P5, step by step,
with what may go wrong at each and what follows:

1. OPEN. `OpenProducer` with a fresh nonce gives the epoch and the high-water mark; from then on older incarnations
   are fenced. What a former process left in the outbox is asked again first: under the new epoch, with the numbers, the
   boundaries and the numbering epoch of then. What was written is answered with its first versions, what was not is
   written now.
2. ACCEPT. A call's messages wait until they are formed. Past their deadline they are withdrawn: nothing was sent.
3. FORM. What waits becomes one request when none is on its way, and up to four are while enough waits to fill one.
   Its numbers go on from the last; its `done_below` is the first number that is not confirmed.
4. SAVE. With an outbox the request is on disk before it is on the wire. The same commit removes what is confirmed,
   so that `done_below` never passes a request that a crash would bring back.
5. ASK. `after_seq` is the last number of the request before it, so that requests on their way together cannot
   overtake each other. Lost connections and new leaders are the client core's: it asks again, the same.
6. ANSWER. Only the fold's answer counts.
   - Produced: its callers get their versions, once; replayed or not is the same to them.
   - SequenceGap: it overtook an earlier one; asked again once that one is written, or once it is out of the way. Asked
     after everything before it was settled, a gap means that the mark is not ours: the producer ends.
   - A refusal (QueueFull, MessageTooLarge …) of a request no other attempt of which can arrive: it was not written and
     never will be. Its callers are told, and the next one is chained to the one before it: numbers are skipped, never
     given anew, so nothing that is on its way can be taken for something else. If it was refused for its content
     (Misuse) and is made of several calls, it is cut in two instead, so that only the guilty call fails.
   - A refusal while another attempt may still arrive says nothing for certain: it is asked again.
   - ProducerFenced, ProducerUnknown, IdempotencyConflict, a queue that is gone or recreated: the producer ends. All
     who wait and all who come later are told that; those whose messages may have been written, that (Indeterminate).
7. DEADLINE. A caller whose request never went out is told so (Unavailable), and it is taken out. Else he is told
   Indeterminate, and the request stays in the window and is asked again under its numbers for as long as the producer
   lives: later messages keep their order behind it. A new producer with the outbox settles it; without an outbox its
   epoch at least makes sure that nothing of it is written any more.
"""

from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from random import Random
from typing import ClassVar

from holdfast.client.calls import Names, Steps, describe, expect
from holdfast.client.events import Outcome
from holdfast.client.message import pack_parts
from holdfast.client.nodes import backoff_s
from holdfast.client.protocol.commands import OpenProducer, Produce
from holdfast.client.protocol.errors import (
    BadValue,
    BatchTooLarge,
    ConnectFailed,
    HoldfastError,
    IdempotencyConflict,
    Misuse,
    NoLeader,
    OutcomeUnknown,
    Overloaded,
    ProducerFenced,
    ProducerUnknown,
    QueueNotFound,
    QueueRecreated,
    SequenceGap,
    Unavailable,
)
from holdfast.client.protocol.quick import dataclass
from holdfast.client.protocol.replies import Failed, Produced, ProducerOpened
from holdfast.client.protocol.values import Columns, QueueId
from holdfast.client.window import (
    PIPELINE,
    REQUEST_BYTES,
    REQUEST_MESSAGES,
    WINDOW_BYTES,
    Numbered,
    Sending,
    check_window,
)


class ProducerForked(Misuse):
    """A producer is of the process that made it: two of them would give out the same numbers."""

    fact_names: ClassVar[tuple[str, ...]] = ()
    text = "this producer was made before a fork; make another, with a client_id of its own, in this process"


@dataclass(frozen=True, slots=True)
class Save:
    """Make this durable in the outbox, in one commit: first `erased` (first numbers), then `stored`."""

    erased: list[int]
    stored: list[Numbered]


@dataclass(frozen=True, slots=True)
class Ask:
    """Hand this to the client core; its outcome goes to `answered`."""

    request: Numbered
    command: Produce
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Tell:
    """The outcome of a call's messages, exactly once: the versions of theirs, or the error."""

    sending: Sending
    outcome: range | HoldfastError


Do = Save | Ask | Tell


class Producing:
    """One producer of one queue. Not for two threads at once."""

    def __init__(
        self, *, queue_id: QueueId, client_id: str, window: int, timeout_s: float, random: Random, durable: bool = False
    ) -> None:
        check_window(window)
        self.queue_id, self.client_id, self.window = queue_id, client_id, window
        self.epoch = self.high_water = 0
        self.ended: HoldfastError | None = None  # why nothing more can be sent
        self._timeout_s = timeout_s
        self._random = random
        self._durable = durable
        self._most_messages, self._most_bytes = min(REQUEST_MESSAGES, window), REQUEST_BYTES
        self._held_messages = self._held_bytes = 0  # accepted and not settled
        self._line: deque[Sending] = deque()  # not accepted yet: there was no room
        self._waiting: deque[Sending] = deque()  # accepted and not formed; those that were withdrawn too
        self._waiting_messages = self._waiting_bytes = 0
        self._window: deque[Numbered] = deque()  # formed and not settled, by number
        self._next_seq = 1
        self._turn = 0  # counts what is asked
        self._moved_turn = 0  # when the place to continue from last changed
        self._deadlines: list[tuple[float, int, Sending]] = []
        self._accepted = 0
        self._confirmed: list[int] = []  # the outbox may forget them when it is written next
        self._erased: list[int] = []  # it must, before their callers hear that they did not happen
        self._good: list[Do] = []
        self._bad: list[Do] = []
        self._failure: HoldfastError | None = None
        self._looked_s = 0.0  # when `take_actions` was last asked

    # What comes in --------------------------------------------------------------------------------------

    def opened(self, epoch: int, high_water: int, left: Sequence[Numbered] = ()) -> None:
        """The cluster's answer, and what a former process left in the outbox, ascending."""
        self.epoch, self.high_water = epoch, high_water
        self._window.extend(left)
        for request in left:
            request.uncertain = request.saved = True
        self._next_seq = max(high_water, left[-1].last_seq if left else 0) + 1

    def line_up(self, sending: Sending) -> None:
        """Messages are accepted in the order in which their callers came; `leave_line` when they are in, or away."""
        self._line.append(sending)

    def leave_line(self, sending: Sending) -> None:
        self._line.remove(sending)

    def may_enter(self, sending: Sending) -> bool:
        """Whether it is its turn and it fits into the window; a large one has to itself what it does not fit into."""
        return self._line[0] is sending and self._has_room(sending)

    def _has_room(self, sending: Sending) -> bool:
        return not self._held_messages or (
            self._held_messages + len(sending.parts) <= self.window
            and self._held_bytes + sending.size_bytes <= WINDOW_BYTES
        )

    def no_room(self) -> Overloaded:
        """What to say of messages that found no room in their time."""
        text = f"the window of {self.window} messages or {WINDOW_BYTES} bytes stayed full; this was not sent"
        return Overloaded(text, limit_name="window", limit=self.window, retry_after_ms=0)

    def send(self, sending: Sending, deadline_s: float) -> None:
        """Accept messages that there is room for. Raises what ended the producer."""
        self.check()
        sending.deadline_s = deadline_s
        self._accepted += 1
        heappush(self._deadlines, (deadline_s, self._accepted, sending))
        self._waiting.append(sending)
        self._waiting_messages += len(sending.parts)
        self._waiting_bytes += sending.size_bytes
        self._held_messages += len(sending.parts)
        self._held_bytes += sending.size_bytes

    def answered(self, request: Numbered, outcome: Outcome, now_s: float) -> None:
        """What became of an Ask."""
        request.asked = False
        if request not in self._window:
            return  # it was let go
        if isinstance(outcome, HoldfastError):
            error = outcome
        elif isinstance(outcome.reply, Failed):
            error = outcome.reply.error
        else:
            self._confirm(request, expect(Produced, outcome))
            return
        request.uncertain = request.uncertain or error.happened == "maybe"
        if self.ended is None:
            self._refused_or_open(request, error, now_s)
        if self.ended is None:
            self._lapse(request, now_s)
        else:
            self._let_go(request)

    def check(self) -> None:
        """Raises what ended the producer."""
        if self.ended is not None:
            raise again(self.ended)

    def end(self, error: HoldfastError) -> None:
        """Nothing more is asked. Requests that are on their way get their own answers."""
        if self.ended is not None:
            return
        self.ended = error
        for sending in self._waiting:
            self._drop(sending, again(error))
        self._waiting.clear()
        self._waiting_messages = self._waiting_bytes = 0
        for request in list(self._window):
            if not request.asked:
                self._let_go(request)

    def close(self) -> None:
        """Tell everybody what is known now; what is not settled stays in the outbox."""
        self.end(BadValue(field="producer", problem="is closed; make another"))
        for request in list(self._window):
            request.uncertain = True
            self._let_go(request)
        self._erased += self._confirmed
        self._confirmed = []

    def not_saved(self, rest: Sequence[Do], error: HoldfastError) -> list[Do]:
        """The outbox could not be written: what was to follow is not done. Gives what is to be done instead.

        What the file holds now is not known, so that nobody is told that his messages will not be written.
        """
        for request in self._window:
            request.uncertain = True
        instead: list[Do] = []
        for do in rest:
            if isinstance(do, Ask):
                do.request.asked = False
            elif isinstance(do, Tell):
                instead.append(Tell(do.sending, OutcomeUnknown(problem=f"the outbox failed: {error}")))
        self.end(error)
        return instead

    # What is to be done ---------------------------------------------------------------------------------

    def take_actions(self, now_s: float) -> list[Do]:
        """In this order: whoever is told that nothing happened is told after the outbox has forgotten it."""
        self._looked_s = now_s
        self._expire(now_s)
        self._form()
        asks = self._asks(now_s)
        saves: list[Do] = []
        stored = [request for request in self._window if not request.saved] if self._durable else []
        if self._durable and (stored or self._erased):
            saves = [Save(self._erased + self._confirmed, stored)]
            self._confirmed = []
            for request in stored:
                request.saved = True
        self._erased = []
        good, self._good = self._good, []
        bad, self._bad = self._bad, []
        return [*good, *saves, *asks, *bad]

    @property
    def settled(self) -> bool:
        """Every message that was accepted has its outcome."""
        return not self._waiting_messages and not self._window

    @property
    def wake_at_s(self) -> float:
        """When `take_actions` may have something without anything coming in."""
        while self._deadlines and self._deadlines[0][2].told:
            heappop(self._deadlines)
        times = [request.not_before_s for request in self._window if request.not_before_s > self._looked_s]
        if self._deadlines:
            times.append(self._deadlines[0][0])
        return min(times, default=float("inf"))

    def check_settled(self) -> None:
        """Raises what ended the producer, or that the window did not empty in time."""
        self.check()
        if not self.settled:
            raise self._unsettled()

    def check_flushed(self) -> None:
        """The same; then the first failure, since this last told one, of messages that nobody waited for."""
        self.check_settled()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise again(failure)

    def _unsettled(self) -> OutcomeUnknown:
        """What to say of a window that did not empty in time."""
        count = sum(request.columns.count for request in self._window if not request.confirmed)
        text = f"{count + self._waiting_messages} messages have no answer yet; the producer goes on asking"
        return OutcomeUnknown(text, problem="the window did not empty in time")

    # Forming and asking ---------------------------------------------------------------------------------

    def _form(self) -> None:
        full = max(1, min(self._most_messages, self.window // PIPELINE))
        while self._waiting and self.ended is None:
            underway = sum(not request.confirmed for request in self._window)
            filled = self._waiting_messages >= full or self._waiting_bytes >= self._most_bytes
            if underway >= PIPELINE or (underway and not filled):
                return
            chosen = self._next_portion()
            if chosen:
                columns, body = _packed(chosen)
                done_below = self._window[0].first_seq if self._window else self._next_seq
                request = Numbered(self._next_seq, self.epoch, columns, body, done_below, chosen)
                for sending in chosen:
                    sending.request = request
                self._next_seq += columns.count
                self._window.append(request)

    def _next_portion(self) -> list[Sending]:
        chosen: list[Sending] = []
        count = size = 0
        while self._waiting:
            sending = self._waiting[0]
            if not sending.told:
                count += len(sending.parts)
                size += sending.size_bytes
                if chosen and (count > self._most_messages or size > self._most_bytes):
                    break
                chosen.append(sending)
                self._waiting_messages -= len(sending.parts)
                self._waiting_bytes -= sending.size_bytes
            self._waiting.popleft()
        return chosen

    def _asks(self, now_s: float) -> list[Do]:
        asks: list[Do] = []
        free = PIPELINE - sum(request.asked for request in self._window)
        before: Numbered | None = None
        for request in self._window:
            if self.ended is not None:
                break
            if not request.asked and not request.confirmed:
                # One that had overtaken waits until the one before it is written, or was asked after that.
                chained = before is None or before.confirmed or (before.asked and before.asked_turn > request.gap_turn)
                if not free or not chained or request.not_before_s > now_s:
                    break
                free -= 1
                asks.append(self._ask(request, before, now_s))
            before = request
        return asks

    def _ask(self, request: Numbered, before: Numbered | None, now_s: float) -> Ask:
        self._turn += 1
        request.asked, request.asked_turn, request.not_before_s = True, self._turn, 0.0
        command = Produce(
            queue_id=self.queue_id,
            columns=request.columns,
            body=request.body,
            client_id=self.client_id,
            epoch=self.epoch,
            numbering_epoch=request.numbering_epoch,
            first_seq=request.first_seq,
            after_seq=max(before.last_seq if before is not None else 0, self.high_water),
            done_below=request.done_below,
        )
        until_s = None if request.uncertain else request.next_deadline_s
        return Ask(request, command, now_s + self._timeout_s if until_s is None else until_s)

    # Answers --------------------------------------------------------------------------------------------

    def _confirm(self, request: Numbered, reply: Produced) -> None:
        request.confirmed = True
        version = int(reply.first_version)
        for sending in request.sendings:
            self._tell(sending, range(version, version + len(sending.parts)))
            self._release(sending)
            version += len(sending.parts)
        request.sendings = []
        self.high_water = max(self.high_water, request.last_seq)
        self._moved_turn = self._turn
        while self._window and self._window[0].confirmed:
            first_seq = self._window.popleft().first_seq
            if self._durable:
                self._confirmed.append(first_seq)

    def _refused_or_open(self, request: Numbered, error: HoldfastError, now_s: float) -> None:
        cause = error.__cause__ if isinstance(error.__cause__, HoldfastError) else error
        match cause:
            case ProducerFenced() | ProducerUnknown() | IdempotencyConflict() | QueueNotFound() | QueueRecreated():
                self.end(cause)
            case SequenceGap():
                before = self._before(request)
                settled = before is None or before.confirmed
                if settled and request.asked_turn > self._moved_turn:
                    self.end(cause)
                request.gap_turn = self._turn
            case _ if cause.happened == "no" and not isinstance(cause, Unavailable) and not request.sendings:
                self.end(cause)  # a former process left it: it is in the outbox until it is written
            case _ if request.uncertain or isinstance(cause, Unavailable):
                request.setbacks += 1
                request.not_before_s = now_s + backoff_s(request.setbacks, self._random)
            case Misuse() if len(request.sendings) > 1:
                self._halve(request, cause)
            case _:
                for sending in request.sendings:
                    self._drop(sending, again(cause))
                self._recut(request, [])

    def _halve(self, request: Numbered, error: Misuse) -> None:
        """Cut it between two calls, under the same numbers: no attempt of the whole can arrive any more."""
        if isinstance(error, BatchTooLarge) and error.limit_name == "batch_messages":
            self._most_messages = max(1, min(self._most_messages, error.limit))
        if isinstance(error, BatchTooLarge) and error.limit_name == "batch_bytes":
            self._most_bytes = max(1, min(self._most_bytes, error.limit))
        middle = len(request.sendings) // 2
        rest = request.sendings[middle:]
        self._recut(request, request.sendings[:middle])
        columns, body = _packed(rest)
        second = Numbered(request.last_seq + 1, request.numbering_epoch, columns, body, request.done_below, rest)
        for sending in rest:
            sending.request = second
        self._window.insert(self._window.index(request) + 1, second)

    def _recut(self, request: Numbered, rest: list[Sending]) -> None:
        """Leave only these in a request no attempt of which can arrive any more; without any it is out of the way."""
        self._moved_turn = self._turn
        self._erased.append(request.first_seq)
        request.sendings = rest
        if rest:
            request.columns, request.body = _packed(rest)
            request.saved = False
        else:
            self._window.remove(request)

    def _let_go(self, request: Numbered) -> None:
        """The producer has ended, and this has no answer of its own: say what is known of it."""
        if request not in self._window or self.ended is None:
            return
        ended = self.ended
        unwritten = isinstance(ended, ProducerFenced) and ended.high_water < request.first_seq
        # Those who were told Indeterminate, and a former process, may still count on the outbox.
        hoped = not request.sendings or any(sending.told for sending in request.sendings)
        if request.uncertain and (hoped or not unwritten):
            for sending in request.sendings:
                unknown = OutcomeUnknown(problem=f"the producer ended before the answer came: {ended}")
                unknown.__cause__ = ended
                self._drop(sending, unknown)
            self._window.remove(request)
        else:
            for sending in request.sendings:
                self._drop(sending, again(ended))
            self._recut(request, [])

    def _before(self, request: Numbered) -> Numbered | None:
        at = self._window.index(request)
        return self._window[at - 1] if at else None

    # Deadlines ------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            sending = heappop(self._deadlines)[2]
            if sending.told:
                continue
            if sending.request is not None:
                self._lapse(sending.request, now_s)
                continue
            self._waiting_messages -= len(sending.parts)
            self._waiting_bytes -= sending.size_bytes
            self._drop(sending, NoLeader("no answer came in time to what was sent before; this was not sent"))
        while self._waiting and self._waiting[0].told:  # it may be long until the next one is formed
            self._waiting.popleft()

    def _lapse(self, request: Numbered, now_s: float) -> None:
        """Tell those whose time is over. While it is on its way for the first time, the client core will say more."""
        late = [sending for sending in request.sendings if sending.deadline_s <= now_s and not sending.told]
        if request.uncertain:
            for sending in late:
                text = (
                    "no answer came in time: it may be written; the producer goes on asking, and flush() waits for it"
                )
                self._tell(sending, OutcomeUnknown(text, problem="no answer came in time"))
        elif late and not request.asked:
            for sending in late:
                self._drop(sending, NoLeader("no leader answered in time; it was not written"))
            self._recut(request, [sending for sending in request.sendings if not sending.told])

    def _tell(self, sending: Sending, outcome: range | HoldfastError) -> None:
        if sending.told:
            return
        sending.told = True
        if isinstance(outcome, range):
            self._good.append(Tell(sending, outcome))
            return
        self._bad.append(Tell(sending, outcome))
        if not sending.awaited and outcome.happened == "no" and self._failure is None:
            self._failure = outcome

    def _drop(self, sending: Sending, error: HoldfastError) -> None:
        self._tell(sending, error)
        self._release(sending)

    def _release(self, sending: Sending) -> None:
        self._held_messages -= len(sending.parts)
        self._held_bytes -= sending.size_bytes


def opening(
    names: Names, queue: str, client_id: str, nonce: bytes, claim: Callable[[QueueId], list[Numbered]]
) -> Steps[tuple[QueueId, ProducerOpened, list[Numbered]]]:
    """Begin an epoch on the queue that has this name now. `claim` takes the outbox before anybody is fenced."""
    queue_id = (yield from describe(names, queue)).queue_id
    left = claim(queue_id)
    command = OpenProducer(queue_id=queue_id, client_id=client_id, nonce=nonce)
    return queue_id, expect(ProducerOpened, (yield command)), left


def versions_of(outcomes: Sequence[range | HoldfastError]) -> list[int]:
    """What a call has come to whose messages went in portions: no error says "no" while another portion is written."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, HoldfastError)]
    if not errors:
        return [version for versions in outcomes if isinstance(versions, range) for version in versions]
    first = errors[0]
    if first.happened == "maybe" or (len(errors) == len(outcomes) and all(e.happened == "no" for e in errors)):
        raise first
    written = sum(len(versions) for versions in outcomes if isinstance(versions, range))
    text = f"{written} of these messages are written, others not or perhaps: {first.message}"
    raise OutcomeUnknown(text, problem="it is done in part") from first


def ended_by(error: BaseException) -> HoldfastError:
    """Why the client under a producer asks nothing more, as callers are told."""
    if isinstance(error, HoldfastError):
        return error
    return ConnectFailed(f"the client ended by a defect: {error!r}", addresses="")


def again(error: HoldfastError) -> HoldfastError:
    """The same to raise once more: an exception that several threads raise would grow with each of them."""
    return type(error)(error.message, **error.facts)


def _packed(sendings: Sequence[Sending]) -> tuple[Columns, bytes]:
    if len(sendings) == 1:
        return pack_parts(sendings[0].parts)
    return pack_parts([part for sending in sendings for part in sending.parts])
