"""Defects of whole nodes and clients. All but a few must be caught by the seeds that every run of the tests plays.

The numbers are those of the list that the harness was designed by; each names the invariant that it breaks.
"""

from holdfast.jepsen.mutants.mutant import Mutant

_THREE = ("tests/simulation/test_simulation.py::test_three_nodes_break_no_promise_and_become_whole",)
_CALM = ("tests/simulation/test_simulation.py::test_clocks_that_jump_and_clients_that_die_are_noticed_by_nobody",)
_HEALING = ("tests/simulation/test_healing.py::test_a_step_of_time_that_is_long_on_its_way_costs_no_lease_its_time",)
_BARRIER = ("tests/unit/cluster/test_replica.py::test_a_leader_that_nobody_confirms_answers_no_read",)
_EARLY = ("tests/unit/cluster/test_replica.py::test_what_came_to_a_leader_that_never_served_goes_elsewhere",)
_DIFFERING = ("tests/unit/cluster/test_replica.py::test_where_no_majority_agrees_nobody_serves",)
_DOUBTFUL = ("tests/unit/cluster/test_replica.py::test_what_is_in_the_log_when_the_states_differ_is_not_vouched_for",)
_GONE = ("tests/unit/cluster/test_replica.py::test_who_has_gone_gets_nothing_and_leaves_nothing",)
_STAMPS = ("tests/unit/cluster/test_replica.py::test_an_open_lease_is_given_a_stamp_every_second",)
_REPLICA = "cluster/replica.py"
_ASKED = "tests/simulation/test_asked_in_time.py"
_CUT_OFF = (f"{_ASKED}::test_a_leader_that_is_cut_off_tells_those_who_still_reach_it_nothing_old",)

SIMULATED_MUTANTS = (
    # 1
    Mutant(
        name="no-sync-after-an-append",
        rule="I1",
        file="cluster/segments.py",
        old="        self._file.pwrite(data, begin)\n        self._file.sync()\n",
        new="        self._file.pwrite(data, begin)\n",
        tests=_THREE,
    ),
    # 12
    Mutant(
        name="answered-when-appended",
        rule="I1",
        file=_REPLICA,
        old="        target = raft.committed()\n",
        new="        target = raft.journal.last\n",
        tests=_THREE,
    ),
    # 16
    Mutant(
        name="a-waiter-is-found-without-its-term",
        rule="I1",
        file="cluster/batcher.py",
        old="            if (waiting.index, waiting.term) == (index, term):",
        new="            if waiting.index == index:",
        tests=_THREE,
    ),
    # 17
    Mutant(
        name="terms-begin-anew-after-a-restart",
        rule="I29",
        file="cluster/consensus.py",
        old="        library.term = max(journal.term, journal.last_term)",
        new="        library.term = 0",
        tests=_THREE,
    ),
    # 19
    Mutant(
        name="a-query-passes-no-barrier",
        rule="I26",
        file=_REPLICA,
        old="            self.raft.read_barrier(partial(self._passed, token, query, self.now_ms))",
        new="            self._passed(token, query, self.now_ms, self.raft.applied)",
        tests=(*_BARRIER, *_CUT_OFF),
    ),
    # 21, and with it 2: votes wait in the same box
    Mutant(
        name="simulated-answer-before-its-sync",
        rule="I1",
        file="cluster/outbox.py",
        old="        if self._journal.lsn > self._journal.durable_lsn:",
        new="        if False:",
        tests=_THREE,
    ),
    # 23
    Mutant(
        name="the-stamp-is-the-wall-clock",
        rule="I25",
        file=_REPLICA,
        old="self.batcher.next_entry(self.time.stamp(now_ms), even_empty)",
        new="self.batcher.next_entry(self._wall_ms(), even_empty)",
        tests=_CALM,
    ),
    # 24
    Mutant(
        name="a-new-leader-starts-from-its-wall-clock",
        rule="I25",
        file=_REPLICA,
        old="                    latest_ms = self._latest_stamp_ms()\n",
        new="                    latest_ms = self._wall_ms()\n",
        tests=_THREE,
    ),
    # 30
    Mutant(
        name="simulated-replay-writes-again",
        rule="I4",
        file="storage/produce.py",
        old="if known is not None and known[2] == count and known[4] == command.content_hash:",
        new="if known is not None and known[2] == count and known[4] != command.content_hash:",
        tests=_THREE,
    ),
    # 43
    Mutant(
        name="a-retried-request-is-a-new-one",
        rule="I11",
        file="storage/sessions.py",
        old="    known = row.window.get(number)\n",
        new="    known = None\n",
        tests=_THREE,
    ),
    # 45
    Mutant(
        name="a-nack-delay-is-ignored",
        rule="I16",
        file="storage/settle.py",
        old="    delay = nack_delay(state, queue, group, command)\n",
        new="    delay = nack_delay(state, queue, group, command) and 0\n",
        tests=_THREE,
    ),
    # 49
    Mutant(
        name="a-deposed-leader-calls-a-group-empty",
        rule="I26",
        file=_REPLICA,
        old="""                case waiters.Confirm(token=token):
                    self.raft.read_barrier(partial(self._confirmed, token))
""",
        new="""                case waiters.Confirm(token=token):
                    self.waiters.confirmed(token)
""",
        tests=(*_BARRIER, *_CUT_OFF),
    ),
    # 51
    Mutant(
        name="nobody-is-woken-by-what-falls-due",
        rule="I32",
        file="cluster/waiters.py",
        old="        due_ms = next_due_ms(view, queue, group) if wanted else None\n",
        new="        due_ms = None\n",
        tests=_CALM,
    ),
    # 73
    Mutant(
        name="a-timeout-is-booked-as-a-failure",
        rule="I2",
        file="client/flight.py",
        old="    if pending.may_have_happened:\n        advice",
        new="    if False:\n        advice",
        tests=_THREE,
    ),
    # 74, 76
    Mutant(
        name="what-may-have-happened-gets-new-numbers",
        rule="I2",
        file="client/core.py",
        old="            pending.lost = True\n",
        new="            pending.forget_identity()\n",
        tests=_THREE,
    ),
    Mutant(
        name="stamps-go-on-while-a-step-is-on-its-way",
        rule="I25",
        file=_REPLICA,
        old="        self._stepping = bool(proposal.tokens) and isinstance(proposal.tokens[0], _StepToken)\n",
        new="",
        tests=_HEALING,
    ),
    Mutant(
        name="an-open-lease-gets-no-stamps",
        rule="I25",
        file=_REPLICA,
        old="(reap or self.time.touch_due(now_ms, self._lease_open(now_ms)))",
        new="reap",
        tests=_STAMPS,
    ),
    Mutant(
        name="what-was-in-doubt-did-not-happen",
        rule="I2",
        file="cluster/batcher.py",
        old="""        self._in_doubt += self._on_its_way
        self._on_its_way = []
        outcomes = self._refuse_formed()
""",
        new="""        gone, self._on_its_way = self._on_its_way, []
        outcomes = [each for waiting in gone for each in self._refuse(waiting.tokens)] + self._refuse_formed()
""",
        tests=_THREE,
    ),
    Mutant(
        name="who-has-left-still-waits",
        rule="I32",
        file=_REPLICA,
        old="                self.waiters.cancel(token)\n",
        new="                pass\n",
        tests=_GONE,
    ),
    Mutant(
        name="what-the-command-of-a-dead-client-brings-wakes-nobody",
        rule="I32",
        file=_REPLICA,
        old="                for queue_id in _queues_of(command):\n",
        new="                for queue_id in ():\n",
        tests=(f"{_ASKED}::test_who_waits_is_woken_by_what_the_command_of_a_killed_client_brings",),
    ),
    Mutant(
        name="the-lease-of-a-dead-client-takes-nothing",
        rule="I32",
        file=_REPLICA,
        old="            known = self.batcher.abandon(token)\n",
        new="            self.waiters.cancel(token)\n            known = self.batcher.abandon(token)\n",
        tests=(f"{_ASKED}::test_who_waits_is_woken_by_what_the_command_of_a_killed_client_brings",),
    ),
    Mutant(
        name="early-requests-are-forgotten",
        rule="I32",
        file=_REPLICA,
        old="        for take in early:\n            take()  # finds that we do not serve\n",
        new="",
        tests=(*_EARLY, f"{_ASKED}::test_what_came_early_to_a_leader_that_never_serves_has_an_outcome"),
    ),
    Mutant(
        name="commands-are-taken-while-the-states-differ",
        rule="I27",
        file=_REPLICA,
        old="        elif not self.leads or self._is_doubtful:\n",
        new="        elif not self.leads:\n",
        tests=_DIFFERING,
    ),
    Mutant(
        name="an-answer-is-given-while-the-states-differ",
        rule="I27",
        file=_REPLICA,
        old="            if isinstance(outcome, Answer) and self._is_doubtful:",
        new="            if isinstance(outcome, Answer) and self.damage is not None:",
        tests=_DOUBTFUL,
    ),
    Mutant(
        name="a-doubt-ends-with-a-restart",
        rule="I27",
        file=_REPLICA,
        old="        if passed is not None:\n            self._comparing.tell(raft.me, *passed)\n",
        new="",
        tests=("tests/unit/cluster/test_replica.py::test_a_doubt_outlives_a_restart_of_all_who_are_in_it",),
    ),
    Mutant(
        name="a-diverged-node-answers-questions",
        rule="I26",
        file=_REPLICA,
        old="""        if self._is_doubtful:
            self._outcomes.append((token, self._not_here()))
        elif inquiry.stale:""",
        new="        if inquiry.stale:",
        tests=("tests/unit/cluster/test_replica.py::test_a_node_whose_state_differs_answers_no_question",),
    ),
)
