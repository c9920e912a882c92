"""How open files are shared, and what is too few."""

import errno
import os
import resource
import subprocess
import sys

import pytest

from holdfast.cluster.descriptors import FILES_MIN, RESERVE, STRANGERS_MAX, TooFewFiles, is_shortage, share

RAISED = "from holdfast.cluster.descriptors import allow_files; print(allow_files(1_000), end='')"


@pytest.mark.parametrize("files", [FILES_MIN, 400, 1_024, 4_096, 1_000_000])
def test_clients_leave_what_the_node_itself_needs(files: int) -> None:
    found = share(files, 4_096)
    assert found.connections + found.strangers + RESERVE <= files
    assert 48 <= found.connections <= 4_096
    assert 16 <= found.strangers <= STRANGERS_MAX
    assert share(files, 50).connections <= 50


def test_with_enough_files_all_connections_that_are_wanted_are_allowed() -> None:
    assert share(RESERVE + STRANGERS_MAX + 4_096, 4_096).connections == 4_096


def test_too_few_files_are_refused_with_what_to_do() -> None:
    with pytest.raises(TooFewFiles, match="at least 320 open files, and the system allows 319: raise the hard limit"):
        share(FILES_MIN - 1, 4_096)


@pytest.mark.parametrize(("soft", "hard", "then"), [(100, 500, 500), (100, 5_000, 1_768), (3_000, 5_000, 3_000)])
def test_the_limit_is_raised_as_far_as_it_is_needed_and_never_lowered(soft: int, hard: int, then: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    done = subprocess.run([sys.executable, "-c", RAISED], preexec_fn=limit, capture_output=True, text=True, check=True)
    assert done.stdout == str(then)


def test_a_shortage_is_told_from_what_is_broken() -> None:
    assert is_shortage(OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
    assert not is_shortage(OSError(errno.EIO, os.strerror(errno.EIO)))
