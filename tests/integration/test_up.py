"""`holdfast up --demo` as a user runs it: real processes, what it tells, and that it leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.client.blocking import Client
from holdfast.client.cli.up import Plan
from tests.support.processes import WAIT_S, free_base, until

DEMO_S = 120.0  # it takes about 20 s on an idle machine


@pytest.mark.slow
def test_the_demonstration_loses_nothing_and_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    plan = Plan(3, tmp_path / "data", free_base(3))
    command = ("up", "--demo", "--data", str(plan.data), "--base-port", str(plan.base_port))
    output = tmp_path / "output"
    with output.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.client.cli", *command], stdout=stream, stderr=stream
        )
    try:
        until(lambda: process.poll() is not None or "consume demo --ack" in output.read_text(), "it goes on", DEMO_S)
        assert process.poll() is None, output.read_text()
        with Client(plan.connect) as client:
            client.produce("demo", [b"after it"])
    finally:
        process.send_signal(signal.SIGINT)
        code = process.wait(WAIT_S)
    told = output.read_text()
    print(told)
    assert code == 0, told
    [confirmed, acked] = _numbers(r"([\d,]+) messages were confirmed, ([\d,]+) were acked", told)
    assert confirmed == acked > 0
    assert "0 lost, 0 handed out twice, 0 that nobody sent" in told
    [killed] = re.findall(r"kill -9 of (n\d), pid \d+", told)
    assert re.search(rf"(?!{killed})n\d leads now", told)
    assert re.findall(r"attempt (\d)", told) == ["1", "2", "3"]
    assert "Dead after exactly 3 attempts (max_attempts, last error 'boom')" in told
    assert f"{killed} is started again" in told
    assert "\x1b" not in told  # no terminal
    assert told.endswith("stopped\n")
    assert f"export HOLDFAST_CONNECT={plan.connect}" in told
    for pid in map(int, re.findall(r"  n\d  pid (\d+)", told)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    for name in plan.names:
        assert "event=stopped" in (plan.data / f"{name}.log").read_text().rpartition("event=started")[2]


def _numbers(pattern: str, text: str) -> list[int]:
    [found] = re.findall(pattern, text)
    return [int(number.replace(",", "")) for number in found]
