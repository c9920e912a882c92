"""Group commit, and R16: every command gets exactly one outcome, and the right one, also when leadership is lost."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from holdfast.client.protocol.commands import Command, Envelope, OpenSession, Produce, Stage, Touch, Transaction
from holdfast.client.protocol.errors import (
    BatchTooLarge,
    HoldfastError,
    Indeterminate,
    LeaderChanged,
    NotLeader,
    Overloaded,
    StateBroken,
    Unavailable,
)
from holdfast.client.protocol.replies import Answer, Done
from holdfast.client.protocol.values import LOCAL_PRINCIPAL, Place, QueueId, SessionId, Stream
from holdfast.cluster.batcher import COMMAND_BYTES, Batcher, Bounds, Outcome, Proposal, Token
from holdfast.cluster.consensus import BATCH
from holdfast.cluster.messages import ENTRY_BYTES
from holdfast.storage.entry import Entry, decode_entry
from holdfast.storage.state import content_hash
from tests.support.machine import produce, stage

STAMP_MS = 1_700_000_000_000
Q = QueueId(1)


def touch(number: int = 1) -> Envelope:
    return Envelope(principal=LOCAL_PRINCIPAL, command=Touch(queue_id=QueueId(number)))


def sized(size_bytes: int) -> Envelope:
    return Envelope(principal=LOCAL_PRINCIPAL, command=produce(1, bytes(size_bytes), client_id="c"))


def entry(proposal: Proposal | None) -> Entry:
    assert proposal is not None
    assert proposal.data[:1] == BATCH
    return decode_entry(7, memoryview(proposal.data)[1:])


def form(batcher: Batcher, stamp_ms: int = STAMP_MS) -> Proposal:
    proposal = batcher.next_entry(stamp_ms)
    assert proposal is not None
    return proposal


def send(batcher: Batcher, index: int, term: int, *tokens: str) -> Proposal:
    """Submit these and put them on their way in one entry."""
    for token in tokens:
        batcher.submit(touch(), token)
    proposal = form(batcher)
    batcher.proposed(proposal, index, term)
    return proposal


def answers(index: int, count: int) -> list[Answer]:
    return [Answer(Place(index, position, STAMP_MS), Done()) for position in range(count)]


def names(outcomes: Sequence[Outcome]) -> dict[Token, str]:
    return {token: type(outcome).__name__ for token, outcome in outcomes}


# Forming entries


def test_commands_that_arrived_together_are_one_entry_with_one_stamp_in_their_order() -> None:
    """T1: one stamp."""
    batcher = Batcher()
    for number in range(1, 6):
        batcher.submit(touch(number), number)
    formed = entry(batcher.next_entry(STAMP_MS))
    assert formed.stamp_ms == STAMP_MS
    assert [envelope for envelope, _ in formed.commands] == [touch(number) for number in range(1, 6)]


def test_nothing_queued_is_no_entry_unless_a_stamp_is_wanted() -> None:
    """T2: an entry for the sake of its stamp carries no command."""
    batcher = Batcher()
    assert not batcher.can_form()
    assert batcher.next_entry(STAMP_MS) is None
    bare = batcher.next_entry(STAMP_MS, even_empty=True)
    assert entry(bare).commands == ()
    assert bare is not None
    batcher.proposed(bare, 5, 1)
    assert batcher.applied(5, 1) == []
    assert batcher.entries_in_flight == 0


def test_what_arrives_while_enough_is_on_its_way_forms_the_next_entry() -> None:
    """Group commit."""
    batcher = Batcher(Bounds(entries_in_flight=2))
    send(batcher, 1, 1, "a")
    send(batcher, 2, 1, "b")
    for token in ("c", "d", "e"):
        batcher.submit(touch(), token)
        assert not batcher.can_form()
        assert batcher.next_entry(STAMP_MS) is None
        assert batcher.next_entry(STAMP_MS, even_empty=True) is None
    batcher.applied(1, 1, answers(1, 1))
    assert batcher.can_form()
    assert form(batcher).tokens == ["c", "d", "e"]


def test_entry_is_split_at_its_size_and_the_rest_is_next() -> None:
    """RAFT 2: entries are capped at 1 MB by splitting."""
    batcher = Batcher()
    for token in range(5):
        batcher.submit(sized(400_000), token)
    seen: list[list[Token | None]] = []
    for index in range(1, 4):
        proposal = form(batcher)
        assert len(proposal.data) <= batcher.bounds.entry_bytes + 1_024
        batcher.proposed(proposal, index, 1)
        seen.append(proposal.tokens)
    assert seen == [[0, 1], [2, 3], [4]]
    assert batcher.queued_bytes == 0


def test_entry_takes_a_bounded_number_of_commands() -> None:
    batcher = Batcher(Bounds(entry_commands=3))
    for token in range(4):
        batcher.submit(touch(), token)
    assert form(batcher).tokens == [0, 1, 2]


def test_one_large_command_is_an_entry_of_its_own_and_fits_the_log() -> None:
    """RAFT 2: 8 MB is the hard limit of an entry."""
    batcher = Batcher()
    batcher.submit(touch(), "before")
    batcher.submit(sized(COMMAND_BYTES - 200), "large")
    batcher.submit(touch(), "after")
    sizes = []
    for index in range(1, 4):
        proposal = form(batcher)
        sizes.append(len(proposal.data))
        batcher.proposed(proposal, index, 1)
    assert batcher.bounds.entry_bytes < max(sizes) == sizes[1] <= ENTRY_BYTES


def test_command_that_no_entry_can_hold_is_refused_before_it_is_queued() -> None:
    """RAFT 2."""
    batcher = Batcher()
    with pytest.raises(BatchTooLarge):
        batcher.submit(sized(COMMAND_BYTES), "large")
    with pytest.raises(BatchTooLarge):
        batcher.submit(touch(), "said to be large", size_bytes=COMMAND_BYTES + 1)
    assert len(batcher) == 0


def test_full_queue_answers_overloaded_at_once() -> None:
    """STYLE: queues are bounded, by count and by bytes; what was taken before stays."""
    batcher = Batcher(Bounds(queued_commands=2, queued_bytes=1_000))
    batcher.submit(touch(), "a")
    with pytest.raises(Overloaded) as full:
        batcher.submit(sized(2_000), "b")
    assert full.value.limit_name == "queued_bytes"
    batcher.submit(touch(), "b")
    with pytest.raises(Overloaded) as full:
        batcher.submit(touch(), "c")
    assert full.value.limit_name == "queued_commands"
    assert form(batcher).tokens == ["a", "b"]


def test_empty_queue_takes_a_command_above_its_bytes() -> None:
    """Else a limit below the largest command would refuse it for ever."""
    batcher = Batcher(Bounds(queued_bytes=10))
    batcher.submit(sized(2_000), "a")
    assert form(batcher).tokens == ["a"]


def test_entries_are_not_formed_while_leadership_is_handed_over() -> None:
    """RAFT 5: hold, do not refuse."""
    batcher = Batcher()
    batcher.submit(touch(), "a")
    batcher.held = True
    assert batcher.next_entry(STAMP_MS) is None
    batcher.held = False
    assert form(batcher).tokens == ["a"]


def test_hash_of_every_batch_is_computed_before_it_enters_the_log() -> None:
    """P2: in a produce, in a stage, and in the produces of a transaction."""
    batcher = Batcher()
    session = SessionId(bytes(16))
    plain, staged = produce(1, b"one", b"two"), stage(Stream("app", 1), 1, b"three")
    bare = replace(plain, content_hash=b"")
    commands: tuple[Command, ...] = (bare, replace(staged, content_hash=b""), Transaction(items=(bare, bare)))
    for number, command in enumerate(commands):
        envelope = Envelope(principal=LOCAL_PRINCIPAL, command=command, session=session, request_seq=number)
        batcher.submit(envelope, number, size_bytes=None if number == 0 else 100)
    found = [envelope.command for envelope, _ in entry(batcher.next_entry(STAMP_MS)).commands]
    batches: list[Any] = [found[0], found[1], *found[2].items]  # type: ignore[union-attr]
    for batch in batches:
        assert isinstance(batch, Produce | Stage)
        assert batch.content_hash == content_hash(batch.columns, batch.body)


def test_hash_that_is_there_is_kept() -> None:
    """P2."""
    batcher = Batcher()
    known = replace(produce(1, b"one", client_id="c"), content_hash=bytes(16))
    batcher.submit(Envelope(principal=LOCAL_PRINCIPAL, command=known), "a")
    found = entry(batcher.next_entry(STAMP_MS)).commands[0][0].command
    assert isinstance(found, Produce)
    assert found.content_hash == bytes(16)


# Outcomes


def test_each_command_gets_the_answer_at_its_position_in_the_entry() -> None:
    """Q2."""
    batcher = Batcher()
    send(batcher, 4, 2, "a", "b")
    given = answers(4, 2)
    assert batcher.applied(4, 2, given) == [("a", given[0]), ("b", given[1])]
    assert len(batcher) == 0


def test_other_entries_decide_nothing() -> None:
    """RAFT 2: waiters are keyed by index and term."""
    batcher = Batcher()
    send(batcher, 9, 2, "a")
    assert batcher.applied(7, 2) == []
    assert batcher.applied(8, 1) == []
    assert len(batcher) == 1


def test_entry_that_was_replaced_has_certainly_not_happened() -> None:
    """RAFT 2: applied with another term, newer or older, is Unavailable: retry freely."""
    for term in (1, 3):
        batcher = Batcher()
        send(batcher, 9, 2, "a", "b")
        assert batcher.lost_leadership("n2") == []
        outcomes = batcher.applied(9, term, answers(9, 1))
        assert outcomes == [("a", NotLeader(leader="n2")), ("b", NotLeader(leader="n2"))]
        assert isinstance(outcomes[0][1], Unavailable)


def test_entry_of_a_lost_leadership_that_was_committed_after_all_is_answered() -> None:
    """R16: indeterminate until its index is applied."""
    batcher = Batcher()
    send(batcher, 9, 2, "a")
    batcher.lost_leadership("n2")
    assert batcher.in_doubt == 1
    given = answers(9, 1)
    assert batcher.applied(9, 2, given) == [("a", given[0])]
    assert batcher.in_doubt == 0


def test_entries_beyond_the_end_of_a_newer_log_do_not_wait_for_it_to_grow() -> None:
    """R16: terms grow along a log, so an older entry cannot stand behind a newer one."""
    batcher = Batcher()
    for index, token in enumerate("abc", 9):
        send(batcher, index, 2, token)
    batcher.lost_leadership("n2")
    assert batcher.applied(8, 2) == []
    assert names(batcher.applied(9, 3)) == dict.fromkeys("abc", "NotLeader")


def test_queued_commands_have_not_happened_when_leadership_is_lost() -> None:
    """R16: they are told at once, and not proposed later."""
    batcher = Batcher()
    send(batcher, 9, 2, "a")
    batcher.submit(touch(), "b")
    assert batcher.lost_leadership("n2") == [("b", NotLeader(leader="n2"))]
    assert batcher.next_entry(STAMP_MS) is None
    assert batcher.queued_bytes == 0


def test_entry_that_raft_did_not_take_has_not_happened() -> None:
    """RAFT 2: propose gives None where we do not lead."""
    batcher = Batcher()
    batcher.submit(touch(), "a")
    assert batcher.not_proposed(form(batcher), "n3") == [("a", NotLeader(leader="n3"))]
    assert len(batcher) == 0


def test_entries_of_a_lost_leadership_take_no_room_from_the_next() -> None:
    """R16."""
    batcher = Batcher(Bounds(entries_in_flight=1))
    send(batcher, 9, 2, "a")
    batcher.lost_leadership(None)
    send(batcher, 11, 4, "b")
    given = answers(9, 1)
    assert batcher.applied(9, 2, given) == [("a", given[0])]
    assert batcher.applied(10, 4) == []
    assert names(batcher.applied(11, 4, answers(11, 1))) == {"b": "Answer"}


def test_two_leaderships_may_wait_at_the_same_index() -> None:
    """RAFT 2: (index, term) is the key."""
    batcher = Batcher()
    send(batcher, 9, 2, "old")
    batcher.lost_leadership(None)
    send(batcher, 9, 4, "new")
    assert names(batcher.applied(9, 4, answers(9, 1))) == {"old": "NotLeader", "new": "Answer"}


def test_snapshot_leaves_in_doubt_what_it_covers() -> None:
    """R16: what was applied there is not known; what is older and behind it cannot have been."""
    batcher = Batcher()
    for index, token in enumerate("abc", 9):
        send(batcher, index, 2, token)
    batcher.lost_leadership("n2")
    assert names(batcher.installed(10, 3)) == {"a": "LeaderChanged", "b": "LeaderChanged", "c": "NotLeader"}
    assert len(batcher) == 0


def test_abandoned_command_is_not_proposed_if_it_was_queued() -> None:
    """L7: a consumer that is gone leaves no lease behind."""
    batcher = Batcher()
    for token in "abc":
        batcher.submit(touch(), token)
    said = batcher.abandon("b")
    assert said is not None and said.happened == "no"
    assert form(batcher).tokens == ["a", "c"]


def test_abandoned_command_on_its_way_may_happen_and_others_keep_their_answers() -> None:
    """R16."""
    batcher = Batcher()
    send(batcher, 9, 2, "a", "b", "c")
    assert isinstance(batcher.abandon("b"), LeaderChanged)
    given = answers(9, 3)
    assert batcher.applied(9, 2, given) == [("a", given[0]), ("c", given[2])]
    assert batcher.abandon("a") is None
    assert len(batcher) == 0


def test_misuse_by_the_owner_stops_the_node() -> None:
    """A lost or doubled waiter would be a lost or doubled answer."""
    batcher = Batcher()
    batcher.submit(touch(), "a")
    with pytest.raises(StateBroken, match="waits already"):
        batcher.submit(touch(), "a")
    proposal = form(batcher)
    with pytest.raises(StateBroken, match="waits already"):
        batcher.submit(touch(), "a")
    with pytest.raises(StateBroken, match="nobody said"):
        batcher.next_entry(STAMP_MS)
    with pytest.raises(StateBroken, match="another entry"):
        batcher.proposed(Proposal(b"", []), 1, 1)
    batcher.proposed(proposal, 9, 1)
    with pytest.raises(StateBroken, match="2 answers"):
        batcher.applied(9, 1, answers(9, 2))
    send(batcher, 10, 1, "b")
    with pytest.raises(StateBroken, match="passed over"):
        batcher.applied(11, 1)


# R16 under load: a random cluster around one batcher


class World:
    """One node's log as other leaders may cut and continue it, and what each token was told."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.batcher = Batcher(Bounds(queued_commands=20, entry_commands=4, entries_in_flight=3))
        self.log: list[tuple[int, tuple[Token | None, ...]]] = [(0, ())]
        self.applied = 0
        self.term = 1
        self.leads = False
        self.tokens = 0
        self.happened: set[Token] = set()
        self.hidden: set[Token] = set()  # under a snapshot, or applied after the waiter was gone
        self.told: dict[Token, Answer | HoldfastError] = {}
        self.gone: set[Token] = set()

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        for token, outcome in outcomes:
            assert token not in self.told, f"{token} was told twice"
            assert token not in self.gone, f"{token} was told after it had gone"
            self.told[token] = outcome

    def submit(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            self.tokens += 1
            try:
                self.batcher.submit(touch(), self.tokens)
            except Overloaded as error:
                self.tell([(self.tokens, error)])

    def propose(self) -> None:
        proposal = self.batcher.next_entry(STAMP_MS, even_empty=self.rng.random() < 0.1)
        if proposal is None:
            return
        if not self.leads:
            self.tell(self.batcher.not_proposed(proposal, None))
            return
        self.log.append((self.term, tuple(proposal.tokens)))
        self.batcher.proposed(proposal, len(self.log) - 1, self.term)

    def apply(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            if self.applied + 1 < len(self.log):
                self.applied += 1
                term, tokens = self.log[self.applied]
                self.happened.update(token for token in tokens if token is not None)
                self.tell(self.batcher.applied(self.applied, term, answers(self.applied, len(tokens))))

    def abandon(self) -> None:
        token = self.rng.randint(1, self.tokens + 1)
        if self.batcher.abandon(token) is not None:
            self.gone.add(token)

    def elect(self) -> None:
        if not self.leads:
            self.term += 1
            self.leads = True
            self.log.append((self.term, ()))

    def lose(self) -> None:
        """Others lead for a while: they cut what is not applied, somewhere, and go on."""
        if self.leads:
            self.leads = False
            self.tell(self.batcher.lost_leadership("other"))
        self.term += self.rng.randint(1, 2)
        kept = self.rng.randint(self.applied + 1, len(self.log))
        del self.log[kept:]
        self.log += [(self.term, ())] * self.rng.randint(1, 3)
        if self.rng.random() < 0.2:
            at = self.rng.randint(self.applied, len(self.log) - 1)
            for _, tokens in self.log[self.applied + 1 : at + 1]:
                self.hidden.update(token for token in tokens if token is not None)
            if at > self.applied:
                self.applied = at
                self.tell(self.batcher.installed(at, self.log[at][0]))

    def run(self) -> None:
        ways = (self.submit, self.propose, self.propose, self.apply, self.apply, self.abandon, self.elect, self.lose)
        for _ in range(300):
            self.rng.choices(ways, weights=(6, 6, 4, 5, 4, 1, 2, 1))[0]()


@pytest.mark.parametrize("seed", range(60))
def test_every_waiter_is_told_once_and_truly_whatever_happens_to_leadership(seed: int) -> None:
    """R16: an answer only if it was applied, "retry freely" only if it never will be, and nothing is left."""
    world = World(seed)
    world.run()
    world.lose()
    while world.applied + 1 < len(world.log):
        world.apply()
    while world.batcher.can_form():
        world.propose()  # what came after the loss is refused
    assert len(world.batcher) == 0, "all is decided once the log is applied"
    assert world.batcher.queued_bytes == world.batcher.in_doubt == world.batcher.entries_in_flight == 0
    assert set(world.told) | world.gone == set(range(1, world.tokens + 1))
    for token, outcome in world.told.items():
        if isinstance(outcome, Answer):
            assert token in world.happened
        elif isinstance(outcome, Unavailable):
            assert token not in world.happened | world.hidden
        else:
            assert isinstance(outcome, Indeterminate)


def test_session_commands_pass_unchanged() -> None:
    """A1: the envelope that identifies a retry is what enters the log."""
    batcher = Batcher()
    given = Envelope(
        principal=LOCAL_PRINCIPAL,
        command=OpenSession(consumer_id="w"),
        session=SessionId(b"s" * 16),
        request_seq=3,
        done_below=2,
    )
    batcher.submit(given, "a")
    assert entry(batcher.next_entry(STAMP_MS)).commands[0][0] == given
