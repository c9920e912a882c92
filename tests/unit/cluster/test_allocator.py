"""Freed memory stays with the process: seen by the page faults of the next use, in a process of its own."""

import subprocess
import sys

import pytest

# A large block that is freed and asked for again, beside another that is freed with it, as a batch and its copy are.
_ROUNDS = """
import resource, sys
from holdfast.cluster.allocator import keep_freed_memory
if sys.argv[1] == "kept" and not keep_freed_memory():
    sys.exit("no mallopt")
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    first = bytearray(300_000)
    second = bytes(first)
    return len(second)
for _ in range(10):
    use()
before = faults()
for _ in range(200):
    use()
print(faults() - before)
"""


def faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", _ROUNDS, how], capture_output=True, text=True)
    if run.stderr.strip() == "no mallopt":
        pytest.skip("this C library has no mallopt")
    return int(run.stdout)


def test_a_block_that_is_freed_and_asked_for_again_costs_no_page_fault() -> None:
    assert faults("kept") < 200 < faults("as it comes")
