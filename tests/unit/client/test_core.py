"""The core by scripted events: every point at which a call can be interrupted, and the exact outcome."""

import math
from random import Random

import pytest

from holdfast.client import nodes
from holdfast.client.core import Core
from holdfast.client.events import (
    Action,
    BytesReceived,
    CallId,
    Close,
    Connect,
    Connected,
    Disconnected,
    Event,
    Finish,
    Outcome,
    WakeAt,
    Woken,
    Write,
)
from holdfast.client.message import Message, pack
from holdfast.client.protocol import codec
from holdfast.client.protocol.commands import Command, DeleteQueue, Lease, OpenSession, Produce
from holdfast.client.protocol.errors import (
    BadValue,
    ConnectFailed,
    ConnectionLost,
    HoldfastError,
    LeaderChanged,
    NoLeader,
    NotLeader,
    OutcomeUnknown,
    Overloaded,
    QueueNotFound,
    RequestSuperseded,
    SessionExpired,
    SessionWindowFull,
    VersionUnsupported,
    Withdrawn,
)
from holdfast.client.protocol.frames import FrameReader, write_frame
from holdfast.client.protocol.messages import (
    NO_REQUEST,
    Answered,
    Declined,
    FromClient,
    FromNode,
    Hello,
    Inquiry,
    Ping,
    Pong,
    Request,
    Unusable,
    Welcome,
    Withdraw,
)
from holdfast.client.protocol.queries import ListQueues, Query
from holdfast.client.protocol.replies import Answer, Done, Failed, QueuesListed, Reply
from holdfast.client.protocol.values import Place, QueueId

CHANGE = DeleteQueue(queue_id=QueueId(1))
LEASE = Lease(queue_id=QueueId(1), group="g", max_messages=9, wait_ms=20_000)
FULL = Overloaded(limit_name="x", limit=1, retry_after_ms=50)


class Script:
    """A core, a clock that stands still until told, and what the core has asked for."""

    def __init__(self, *addresses: str) -> None:
        self.core = Core(addresses or ("a",), random=Random(7))
        self.now_s = 0.0
        self.connects: list[str] = []
        self.closed: list[str] = []
        self.finished: dict[CallId, Outcome] = {}
        self.finished_at: dict[CallId, float] = {}
        self.wake_at_s = math.inf
        self._written: dict[str, list[FromClient | Unusable]] = {}
        self._readers: dict[str, FrameReader] = {}

    def call(self, what: Command | Query = CHANGE, timeout_s: float = 30.0) -> CallId:
        call, actions = self.core.call(what, self.now_s, deadline_s=self.now_s + timeout_s)
        self._note(actions)
        return call

    def tell(self, event: Event) -> None:
        self._note(self.core.handle(event, self.now_s))

    def say(self, address: str, *messages: FromNode) -> None:
        for message in messages:
            header, body = codec.encode_message(message)
            self.tell(BytesReceived(address, b"".join(write_frame(header, *body))))

    def welcome(self, address: str) -> None:
        self.tell(Connected(address))
        assert self.take(address) == [Hello()]
        self.say(address, Welcome(version=1, cluster_id="c", node=address))

    def open(self, address: str) -> None:
        """Welcome the client and open its session."""
        self.welcome(address)
        self.answer(address, self.request(address, OpenSession))

    def answer(self, address: str, asked: Request | Inquiry, reply: Reply | None = None) -> None:
        self.say(address, Answered(asked.request_id, Answer(Place(1, 0, 1), reply or Done())))

    def refuse(self, address: str, asked: Request | Inquiry, error: HoldfastError) -> None:
        self.answer(address, asked, Failed(error))

    def decline(self, address: str, asked: Request | Inquiry, error: HoldfastError) -> None:
        self.say(address, Declined(asked.request_id, error))

    def take(self, address: str) -> list[FromClient | Unusable]:
        return self._written.pop(address, [])

    def request(self, address: str, kind: type[Command] = DeleteQueue) -> Request:
        """The one frame written since the last look; it must be such a request."""
        (request,) = self.take(address)
        assert isinstance(request, Request) and isinstance(request.command, kind), request
        return request

    def inquiry(self, address: str) -> Inquiry:
        (inquiry,) = [frame for frame in self.take(address) if not isinstance(frame, Ping)]
        assert isinstance(inquiry, Inquiry), inquiry
        return inquiry

    def pass_to(self, at_s: float) -> None:
        """Let time pass, waking the core whenever it asked for it."""
        while self.wake_at_s <= at_s:
            self.now_s = max(self.now_s, self.wake_at_s)
            self.tell(Woken())
            assert self.wake_at_s > self.now_s, "it would be woken for ever"
        self.now_s = at_s

    def _note(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Connect(address=address):
                    self.connects.append(address)
                    self._readers[address] = FrameReader()
                    self._written.pop(address, None)
                case Write(address=address, buffers=buffers):
                    for frame in self._readers[address].feed(b"".join(buffers)):
                        message = codec.decode_from_client(frame.header, frame.body)
                        self._written.setdefault(address, []).append(message)
                case Close(address=address):
                    self.closed.append(address)
                case Finish(call=call, outcome=outcome):
                    assert call not in self.finished, "finished twice"
                    self.finished[call] = outcome
                    self.finished_at[call] = self.now_s
                case WakeAt(at_s=at_s):
                    self.wake_at_s = at_s


def identity(request: Request) -> tuple[bytes, int]:
    return request.session, request.request_seq


def test_the_session_is_open_before_the_first_numbered_command_goes() -> None:
    script = Script()
    call = script.call()
    assert script.connects == ["a"]
    script.welcome("a")
    opening = script.request("a", OpenSession)
    assert opening.request_seq == 0 and opening.session == script.core.session
    assert script.take("a") == []
    script.answer("a", opening)
    request = script.request("a")
    assert (request.session, request.request_seq, request.done_below) == (opening.session, 1, 1)
    script.answer("a", request)
    assert script.finished == {call: Answer(Place(1, 0, 1), Done())}


def test_queries_and_what_numbers_itself_need_no_session() -> None:
    script = Script()
    columns, body = pack([b"1"], Message(b""))
    script.call(ListQueues())
    script.call(Produce(queue_id=QueueId(1), columns=columns, body=body, client_id="c", first_seq=1))
    script.welcome("a")
    inquiry, produce = script.take("a")
    assert isinstance(inquiry, Inquiry) and not inquiry.stale
    assert isinstance(produce, Request) and identity(produce) == (b"", 0)


POINTS = ["connecting", "greeting", "opening", "sent"]


def interrupted_at(point: str, timeout_s: float = 30.0) -> tuple[Script, CallId, Request | None]:
    """A call whose only node is lost at this point; and the request, where it was sent."""
    script = Script()
    call = script.call(timeout_s=timeout_s)
    request = None
    if point == "greeting":
        script.tell(Connected("a"))
    elif point == "opening":
        script.welcome("a")
    elif point == "sent":
        script.open("a")
        request = script.request("a")
    script.tell(Disconnected("a"))
    return script, call, request


@pytest.mark.parametrize("point", POINTS)
def test_a_call_survives_a_lost_connection_at_every_point(point: str) -> None:
    script, call, first = interrupted_at(point)
    script.pass_to(1.0)
    assert script.connects == ["a", "a"]
    if point == "sent":
        script.welcome("a")
    else:
        script.open("a")
    again = script.request("a")
    assert first is None or identity(again) == identity(first)
    assert again.request_seq == 1
    script.answer("a", again)
    assert isinstance(script.finished[call], Answer)


@pytest.mark.parametrize("point", POINTS)
def test_at_its_deadline_a_call_says_whether_it_may_have_happened(point: str) -> None:
    script, call, _ = interrupted_at(point, timeout_s=2.0)
    while script.now_s < 2.0:
        script.pass_to(min(max(script.wake_at_s, script.now_s), 2.0))
        script.tell(Disconnected("a"))
    assert isinstance(script.finished[call], ConnectionLost if point == "sent" else ConnectFailed)
    assert script.finished_at[call] == 2.0


def test_a_call_ends_at_its_own_deadline_and_not_before() -> None:
    script = Script()
    early, late = script.call(timeout_s=1.0), script.call(timeout_s=3.0)
    script.open("a")
    script.take("a")
    script.pass_to(0.99)
    assert not script.finished
    script.pass_to(1.0)
    assert list(script.finished) == [early]
    assert isinstance(script.finished[early], OutcomeUnknown)
    script.pass_to(4.0)
    assert script.finished_at == {early: 1.0, late: 3.0}


def test_an_unanswered_query_is_unavailable_never_indeterminate() -> None:
    script = Script()
    call = script.call(ListQueues(), timeout_s=1.0)
    script.welcome("a")
    script.pass_to(1.0)
    assert isinstance(script.finished[call], NoLeader)


@pytest.mark.parametrize(("error", "outcome"), [(FULL, Overloaded), (NotLeader(leader=None), NoLeader)])
def test_a_declined_first_attempt_did_not_happen(error: HoldfastError, outcome: type) -> None:
    script = Script()
    call = script.call(timeout_s=0.04)
    script.open("a")
    script.decline("a", script.request("a"), error)
    script.now_s = 0.04
    script.tell(Woken())
    assert isinstance(script.finished[call], outcome)


@pytest.mark.parametrize("error", [FULL, NotLeader(leader=None), NoLeader()])
def test_a_declined_retry_leaves_the_first_attempt_open(error: HoldfastError) -> None:
    """A2: a node's own no says nothing of the fold."""
    script, call, _ = interrupted_at("sent", timeout_s=0.04)
    script.welcome("a")
    script.decline("a", script.request("a"), error)
    script.now_s = 0.04
    script.tell(Woken())
    assert isinstance(script.finished[call], ConnectionLost)


def test_a_declined_attempt_that_may_have_happened_stays_open() -> None:
    script = Script()
    call = script.call(timeout_s=1.0)
    script.open("a")
    first = script.request("a")
    script.decline("a", first, LeaderChanged())
    script.pass_to(0.2)
    again = script.request("a")
    assert identity(again) == identity(first)
    script.decline("a", again, NotLeader(leader=None))
    script.now_s = 1.0
    script.tell(Woken())
    assert isinstance(script.finished[call], OutcomeUnknown)


def test_a_wrong_call_is_over_at_once() -> None:
    script = Script()
    call = script.call()
    script.open("a")
    error = BadValue(field="f", problem="p")
    script.decline("a", script.request("a"), error)
    assert script.finished[call] == error


@pytest.mark.parametrize("error", [SessionExpired(), RequestSuperseded(request_seq=1, done_below=2)])
def test_a_forgotten_answer_to_a_retry_is_indeterminate(error: HoldfastError) -> None:
    """A2: the first attempt may have happened."""
    script, call, _ = interrupted_at("sent")
    script.welcome("a")
    script.refuse("a", script.request("a"), error)
    assert isinstance(script.finished[call], OutcomeUnknown)


@pytest.mark.parametrize("declined_before", [False, True])
def test_an_expired_session_is_replaced_if_nothing_can_have_happened(declined_before: bool) -> None:
    script = Script()
    call, other = script.call(), script.call()
    script.open("a")
    first, second = script.take("a")
    assert isinstance(first, Request) and isinstance(second, Request)
    if declined_before:
        script.decline("a", first, FULL)
        script.pass_to(0.1)
        first = script.request("a")
    script.refuse("a", first, SessionExpired())
    script.refuse("a", second, SessionExpired())
    script.pass_to(script.now_s + 0.05)
    opening = script.request("a", OpenSession)
    assert opening.session not in (b"", first.session)
    script.answer("a", opening)
    for request in script.take("a"):
        assert isinstance(request, Request) and request.session == opening.session
        script.answer("a", request)
    assert {type(script.finished[each]) for each in (call, other)} == {Answer}


def test_an_answer_of_the_fold_is_the_outcome_whatever_came_before() -> None:
    script, call, _ = interrupted_at("sent")
    script.welcome("a")
    error = QueueNotFound(queue=1)
    script.refuse("a", script.request("a"), error)
    assert script.finished[call] == Answer(Place(1, 0, 1), Failed(error))


def test_what_the_fold_puts_off_is_asked_again_under_the_same_number() -> None:
    script = Script()
    call = script.call()
    script.open("a")
    first = script.request("a")
    script.refuse("a", first, FULL)
    script.pass_to(0.049)
    assert script.take("a") == []
    script.pass_to(0.2)
    again = script.request("a")
    assert identity(again) == identity(first)
    script.answer("a", again)
    assert isinstance(script.finished[call], Answer)


def test_what_the_fold_puts_off_leaves_an_earlier_attempt_open() -> None:
    """A2: The fold remembers no put-off, so what was sent before may still be done."""
    script, call, _ = interrupted_at("sent", timeout_s=0.04)
    script.welcome("a")
    again = script.request("a")
    script.refuse("a", again, FULL)
    script.now_s = 0.04
    script.tell(Woken())
    assert isinstance(script.finished[call], ConnectionLost)


def test_a_full_window_on_the_other_side_is_tried_again_under_the_same_number() -> None:
    script = Script()
    script.call()
    script.open("a")
    first = script.request("a")
    script.refuse("a", first, SessionWindowFull(limit=1))
    script.pass_to(0.1)
    assert identity(script.request("a")) == identity(first)


def test_the_window_bounds_what_is_in_flight_and_done_below_moves_with_answers() -> None:
    script = Script()
    calls = [script.call(timeout_s=5.0) for _ in range(300)]
    script.open("a")
    sent = [request for request in script.take("a") if isinstance(request, Request)]
    assert [request.request_seq for request in sent] == list(range(1, 257))
    assert {request.done_below for request in sent} == {1}
    script.answer("a", sent[4])
    assert script.take("a") == []  # number 1 is still open: the cluster would have to keep 257
    script.answer("a", sent[0])
    script.answer("a", sent[1])
    assert [(r.request_seq, r.done_below) for r in script.take("a") if isinstance(r, Request)] == [(257, 2), (258, 3)]
    script.pass_to(5.0)
    kinds = [type(script.finished[call]) for call in calls]
    assert kinds[0] is Answer and kinds[2] is OutcomeUnknown
    assert kinds[258:] == [Overloaded] * 42  # never sent


def test_a_long_poll_does_not_keep_the_window_full() -> None:
    """Its number is the oldest for as long as it waits: it waits on under a new one, for the rest of its time."""
    script = Script()
    poll = script.call(LEASE, timeout_s=60.0)
    script.open("a")
    lease = script.request("a", Lease)
    script.pass_to(0.2)
    calls = [script.call() for _ in range(300)]
    *sent, withdrawal = script.take("a")
    assert len(sent) == 255 and withdrawal == Withdraw(lease.request_id)
    script.decline("a", lease, Withdrawn())
    again, *rest = [frame for frame in script.take("a") if isinstance(frame, Request)]
    assert isinstance(again.command, Lease) and again.command.wait_ms == 19_800
    assert (again.request_seq, again.done_below, rest) == (257, 2, [])
    for request in sent:
        assert isinstance(request, Request)
        script.answer("a", request)
    rest = [frame for frame in script.take("a") if isinstance(frame, Request)]
    assert len(rest) == 45
    for request in rest:
        script.answer("a", request)
    assert sorted(script.finished) == sorted(calls)
    script.answer("a", again)
    assert poll in script.finished


def test_calls_are_resent_in_their_order() -> None:
    script = Script()
    for _ in range(5):
        script.call()
    script.open("a")
    script.take("a")
    script.tell(Disconnected("a"))
    script.welcome("a")
    again = [request.request_seq for request in script.take("a") if isinstance(request, Request)]
    assert again == [1, 2, 3, 4, 5]


def test_bytes_that_are_no_frames_end_the_connection() -> None:
    script = Script("a", "b")
    script.call()
    script.welcome("a")
    script.tell(BytesReceived("a", b"\xff" * 8))
    assert script.closed == ["a"] and script.connects == ["a", "b"]


def test_a_node_that_speaks_another_version_is_named_in_the_end() -> None:
    script = Script()
    call = script.call(timeout_s=0.004)
    script.tell(Connected("a"))
    script.say("a", Declined(NO_REQUEST, VersionUnsupported(version=1, low=2, high=3)))
    script.pass_to(0.004)
    assert isinstance(script.finished[call], VersionUnsupported)


def test_what_turned_a_client_away_is_named_in_the_end() -> None:
    script = Script()
    call = script.call(timeout_s=0.004)
    script.tell(Connected("a"))
    script.say("a", Declined(NO_REQUEST, FULL))
    assert script.closed == ["a"]
    script.pass_to(0.004)
    assert script.finished[call] == FULL


def test_what_once_turned_a_client_away_is_not_named_after_it_was_let_in() -> None:
    script = Script()
    call = script.call(ListQueues(), timeout_s=1.0)
    script.tell(Connected("a"))
    script.say("a", Declined(NO_REQUEST, FULL))
    script.pass_to(0.5)
    script.welcome("a")
    script.tell(Disconnected("a"))
    script.pass_to(1.0)
    assert isinstance(script.finished[call], ConnectFailed)


def test_events_of_a_closed_connection_are_ignored() -> None:
    script = Script("a", "b")
    script.call()
    script.pass_to(2.0)
    assert "a" in script.closed  # it never welcomed us
    script.tell(Connected("a"))
    script.tell(BytesReceived("a", b"junk"))
    script.tell(Disconnected("a"))


def test_closing_ends_every_call_with_what_is_known() -> None:
    script = Script()
    sent = script.call()
    script.open("a")
    script.take("a")
    asked = script.call(ListQueues())
    script._note(script.core.close(script.now_s))
    assert isinstance(script.finished[sent], OutcomeUnknown)
    assert isinstance(script.finished[asked], NoLeader)
    assert script.closed == ["a"]


def test_nobody_waiting_means_nobody_knocks() -> None:
    script = Script()
    script.call(timeout_s=0.5)
    script.tell(Disconnected("a"))
    script.pass_to(0.5)
    tried = len(script.connects)
    for address in list(script.core._nodes.links):
        script.tell(Disconnected(address))
    script.pass_to(60.0)
    assert len(script.connects) == tried


def test_backoff_grows_to_its_longest_and_never_marches_in_step() -> None:
    random = Random(1)
    waits = [nodes.backoff_s(n, random) for n in range(1, 40)]
    assert all(0.005 <= wait <= nodes.BACKOFF_MAX_S for wait in waits)
    assert len(set(waits)) == len(waits)
    assert min(waits[10:]) >= nodes.BACKOFF_MAX_S / 2


def test_pongs_and_answers_of_calls_that_are_over_change_nothing() -> None:
    script = Script()
    call = script.call()
    script.open("a")
    request = script.request("a")
    script.answer("a", request)
    script.answer("a", request)
    script.decline("a", request, FULL)
    script.say("a", Pong(1))
    assert list(script.finished) == [call]


def test_an_open_lease_call_is_told_apart_from_silence_by_other_answers() -> None:
    script = Script("a", "b")
    script.call(Lease(queue_id=QueueId(1), group="g", max_messages=1, wait_ms=20_000))
    script.open("a")
    script.take("a")
    for step in range(1, 10):
        script.call(ListQueues())
        script.answer("a", script.inquiry("a"), QueuesListed(queues=()))
        script.pass_to(step * 0.2)
    assert script.connects == ["a"]
