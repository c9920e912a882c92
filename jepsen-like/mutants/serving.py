"""Defects in how a node bears its clients: how many, how slow, how much of memory and of one turn they may have."""

from holdfast.jepsen.mutants.mutant import Mutant

_SERVER = "tests/integration/test_server.py::"
_READING = "tests/unit/cluster/test_replica_reading.py::"

SERVING_MUTANTS = (
    Mutant(
        name="every-byte-wins-time-for-a-frame",
        rule="serving",
        file="cluster/patience.py",
        old="        if unfinished != self._frame:\n",
        new="        if unfinished:\n",
        tests=("tests/unit/cluster/test_patience.py::test_the_rest_of_a_frame_has_to_come_in_time_however_it_drips",),
    ),
    Mutant(
        name="a-frame-has-the-time-of-the-one-before-it",
        rule="serving",
        file="cluster/patience.py",
        old="        if unfinished != self._frame:\n",
        new="        if bool(unfinished) != bool(self._frame):\n",
        tests=("tests/unit/cluster/test_patience.py::test_each_frame_has_its_own_time",),
    ),
    Mutant(
        name="more-of-the-same-is-movement",
        rule="serving",
        file="cluster/holdings.py",
        old="            self._held[holder] = size_bytes\n        else:\n",
        new="            self.moved(holder)\n            self._held[holder] = size_bytes\n        else:\n",
        tests=("tests/unit/cluster/test_holdings.py::test_more_of_the_same_is_no_movement",),
    ),
    Mutant(
        name="clients-get-the-files-of-the-journal",
        rule="serving",
        file="cluster/descriptors.py",
        old="    rest = files - RESERVE\n",
        new="    rest = files\n",
        tests=("tests/unit/cluster/test_descriptors.py::test_clients_leave_what_the_node_itself_needs",),
    ),
    Mutant(
        name="too-many-clients-are-cut-off-without-a-word",
        rule="serving",
        file="cluster/connection.py",
        old="            self._send(Declined(NO_REQUEST, error))\n            self.closing, self.error = True, error\n",
        new="            self.closing, self.error = True, error\n",
        tests=("tests/unit/cluster/test_connection.py::test_who_is_turned_away_at_the_hello_is_told_why",),
    ),
    Mutant(
        name="who-breaks-the-protocol-is-not-told-of",
        rule="serving",
        file="cluster/client_stream.py",
        old="            self._clients.rejected(self.address, self.core.error)\n",
        new="            pass\n",
        tests=(_SERVER + "test_who_breaks_the_protocol_is_told_and_so_is_the_operator",),
    ),
    Mutant(
        name="one-turn-reads-all-there-is",
        rule="serving",
        file="cluster/replica.py",
        old="        return self._read_bytes < READ_BYTES\n",
        new="        return True\n",
        tests=(
            _READING + "test_leases_granted_together_bring_their_messages_over_several_turns",
            _READING + "test_pages_asked_for_together_are_read_over_several_turns",
        ),
    ),
    Mutant(
        name="the-log-goes-on-before-its-leases-are-read",
        rule="serving",
        file="cluster/replica.py",
        old="        if self._deliveries:\n            return [], []\n",
        new="",
        tests=(_READING + "test_what_follows_in_the_log_waits_for_the_messages_of_the_leases_before_it",),
    ),
    Mutant(
        name="a-lease-that-is-not-read-yet-is-said-to-be-withdrawn",
        rule="L7",
        file="cluster/replica.py",
        old="        if not granted and envelope is not None",
        new="        if envelope is not None",
        tests=(_READING + "test_a_lease_that_was_granted_and_not_read_yet_cannot_be_withdrawn",),
    ),
)
