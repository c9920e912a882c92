"""The other half of replication: what a node that does not lead lets in and answers, and when it would lead itself.

The library compares, cuts and votes; this keeps from it what it would get wrong, and says to a leader no more than was
compared and is on disk. A log that was cut by a repair has promised more than it knows. What it promised at most is on
record, and until the committed log covers that,

    it does not stand             its log may lack what is committed
    it votes by what it promised  for whoever has all that it may have had: that is the rule of votes, for a log uncut
    it acknowledges by that too   once what it holds of the leader's log reaches beyond its promise, it lacks nothing
    it is no witness for a read
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from holdfast.client.protocol.errors import InvariantBroken, StateBroken
from holdfast.cluster.elections import Elections
from holdfast.cluster.events import Role
from holdfast.cluster.journal import Journal
from holdfast.cluster.leading import Clock
from holdfast.cluster.membership import Configurations
from holdfast.cluster.messages import (
    AppendEntries,
    AppendReply,
    PreVote,
    PreVoteReply,
    RequestVote,
    SnapshotHead,
    StaleTerm,
    VoteGranted,
)
from holdfast.cluster.outbox import Outbox
from holdfast.cluster.replication import fit

if TYPE_CHECKING:
    from holdfast.cluster.raft import Library


class PromiseOpen(InvariantBroken):
    """The only voter has lost what it may have confirmed: nobody can bring it back."""

    text = (
        "the journal was repaired and ends at {last}; up to {promised} may have been confirmed, and this node is the "
        "only voter, so nobody else has that. It does not serve as if it had never been. Put back a copy of the folder "
        "as of its last run in which that can be read; or begin a new cluster, `holdfast node log` prints what is left"
    )
    fact_names = ("promised", "last")
    promised: int
    last: int


class Following:
    """What a node owes to leaders and candidates. It is there also while we lead: another may, in a higher term."""

    def __init__(
        self,
        me: str,
        library: "Library",
        journal: Journal,
        outbox: Outbox,
        clock: Clock,
        elections: Elections,
        configurations: Configurations,
        wall_ms: Callable[[], int],
    ) -> None:
        self._me = me
        self._library, self._journal, self._outbox = library, journal, outbox
        self._clock, self._elections, self._configurations = clock, elections, configurations
        self._wall_ms = wall_ms
        self._answering: tuple[int, int, int | None] = (0, 0, None)  # epoch, barrier, cap of the answer being made

    def adopt_term(self, peer: str, term: int) -> None:
        """Step down to a higher term, by a request for a vote that cannot be granted."""
        if term > self._library.term:
            self._library.request_vote(peer, term, -1, -1)

    def check_promise(self) -> None:
        """After a repair: whether the committed log covers all that ours may have promised before it was cut."""
        promise, commit_index = self._journal.promise, self._library.commit_index
        if promise is not None:
            reached = self._journal.term_at(commit_index)
            if reached is not None and (reached, commit_index) >= (promise.term, promise.index):
                self._journal.promise_kept()

    def settle_promise_alone(self, saw_all: bool) -> None:
        """At the start of the only voter there is: nobody else can cover its promise, but perhaps it was to nobody.

        `saw_all` says that the state here is the one that ever was. An answer follows what was applied, so what is
        beyond it was promised to no client; and with no other member, to nobody. Raises PromiseOpen else.
        """
        self.check_promise()
        promise, ruling = self._journal.promise, self._configurations.current
        if promise is None or ruling.voter_names != (self._me,):
            return
        if not saw_all or ruling.learners:
            raise PromiseOpen(promised=promise.index, last=self._journal.last)
        self._journal.promise_kept()

    @property
    def _leads(self) -> bool:
        return self._library.state == Role.LEADER

    def _covers_promise(self, term: int, index: int) -> bool:
        """Whether a log that ends, or matches ours, at this entry has all that we may have promised."""
        promise = self._journal.promise
        return promise is None or (term, index) >= (promise.term, promise.index)

    # Entries

    def on_append(self, peer: str, message: AppendEntries) -> None:
        library = self._library
        if message.term < library.term:
            # Else a leader of a lower term would never learn of ours (R13).
            self._outbox.send(peer, StaleTerm(library.term))
            return
        if message.term == library.term and self._leads:
            raise StateBroken(problem=f"{self._me} and {peer} both lead in term {message.term}")
        self._elections.heard_leader(self._clock())
        if message.prev_index is None:
            # We wait for a snapshot. Nothing of our log was compared, so nothing of it is committed by this (R6).
            library.heard_leader(peer, message.term, commit_index=0)
            self._answering = (message.epoch, message.barrier, None)
            self.answer(peer, 1, reset=False, success=False)
            return
        fitted = fit(message, message.prev_index, self._journal)
        self._answering = (message.epoch, message.barrier, fitted.ack_cap)
        library.append(peer, message.term, fitted)

    def answer(self, peer: str, next_index: int, reset: bool, success: bool) -> None:
        """Tell the leader how far we are, in the library's words but for what it would say too much."""
        epoch, barrier, cap = self._answering
        if success and cap is not None:
            next_index = min(next_index, cap)
        if reset:
            # Below our commit index nothing can conflict, so the leader need not look there entry by entry (R11).
            next_index = max(self._journal.base + 1, min(next_index, self._library.commit_index + 1))
        if self._journal.promise is not None:
            held = self._journal.term_at(next_index - 1)
            success = success and held is not None and self._covers_promise(held, next_index - 1)
            barrier = 0  # received; until it is covered it is no witness, and no copy either
        term, wall_ms = self._library.term, self._wall_ms()
        self._outbox.send(peer, AppendReply(next_index, reset, success, term, epoch, barrier, wall_ms))

    # Snapshots

    def accepts_snapshot(self, peer: str, head: SnapshotHead) -> bool:
        """Whether to receive this stream; if not, the peer is told why."""
        library = self._library
        if head.term < library.term:
            self._outbox.send(peer, StaleTerm(library.term))
            return False
        self.adopt_term(peer, head.term)
        self._elections.heard_leader(self._clock())
        if head.index <= library.applied:
            self.acknowledge_snapshot(peer, head)
            return False
        return True

    def acknowledge_snapshot(self, peer: str, head: SnapshotHead) -> None:
        self._answering = (head.epoch, 0, None)
        self.answer(peer, head.index + 1, reset=False, success=True)

    # Elections

    def may_not_stand(self) -> bool:
        """No voter, no candidate; nor is a node that may have forgotten what it promised."""
        return self._me not in self._configurations.current.voter_names or self._journal.promise is not None

    def begin_pre_vote(self, now_s: float) -> None:
        """Ask whether an election could be won, before the term is raised for it."""
        self._library.deadline_s = now_s + self._elections.timeout_s()
        round_ = self._elections.begin_round(self._me)
        asked = PreVote(self._library.term + 1, round_, self._journal.last, self._journal.last_term)
        for peer in self._configurations.current.voter_names:
            if peer != self._me:
                self._outbox.send(peer, asked)
        self._stand_if_won()

    def on_pre_vote(self, peer: str, asked: PreVote) -> None:
        library, journal = self._library, self._journal
        last = (journal.last_term, journal.last)
        granted = (
            not self._leads
            and self._covers_promise(asked.last_term, asked.last_index)
            and self._elections.grants(
                asked, peer, term=library.term, last=last, leader=library.leader, now_s=self._clock()
            )
        )
        self._outbox.send(peer, PreVoteReply(library.term, asked.round, granted))

    def on_pre_vote_reply(self, peer: str, reply: PreVoteReply) -> None:
        if reply.term > self._library.term:
            self.adopt_term(peer, reply.term)
        elif reply.granted and not self._leads:
            self._elections.collect(reply.round, peer)
            self._stand_if_won()

    def on_request_vote(self, peer: str, asked: RequestVote) -> None:
        if self._covers_promise(asked.last_term, asked.last_index):
            self._library.request_vote(peer, asked.term, asked.last_index, asked.last_term)
        else:
            self.adopt_term(peer, asked.term)

    def on_vote_granted(self, peer: str, vote: VoteGranted) -> None:
        if self._elections.counts_now(vote.term, peer, self._configurations.current.voter_names):
            self._library.vote_granted(peer, vote.term)

    def _stand_if_won(self) -> None:
        if self._elections.won(self._configurations.current.voter_names):
            self._library.deadline_s = 0  # the next tick runs the library's election
