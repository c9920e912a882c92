"""How long a client may be silent, at which moment."""

import pytest

from holdfast.cluster.patience import ClientIdle, ClientSilent, Patience, Times

TIMES = Times(hello_s=5, frame_s=10, idle_s=100)


def test_a_hello_has_to_come_in_time_however_it_drips() -> None:
    patience = Patience(TIMES, 1_000)
    for second in range(5):
        patience.heard(1, 1_000 + second)
        assert patience.verdict(False, False, 1_000 + second) is None
    assert patience.until_s(greeted=False) == 1_005
    assert isinstance(patience.verdict(False, False, 1_005), ClientSilent)


def test_the_rest_of_a_frame_has_to_come_in_time_however_it_drips() -> None:
    patience = Patience(TIMES, 1_000)
    patience.heard(0, 1_001)
    for second in range(10):
        patience.heard(2, 1_050 + second)
        assert patience.verdict(True, True, 1_050 + second) is None
    assert patience.until_s(greeted=True) == 1_060
    assert isinstance(patience.verdict(True, True, 1_060), ClientSilent)


def test_each_frame_has_its_own_time() -> None:
    """Pipelined requests leave a piece of the next one behind every time."""
    patience = Patience(TIMES, 1_000)
    for frame in range(2, 50):
        patience.heard(frame, 1_000 + 9 * frame)
        assert patience.until_s(greeted=True) == 1_000 + 9 * frame + 10
    patience.heard(0, 1_500)
    assert patience.until_s(greeted=True) == 1_600


@pytest.mark.parametrize(("waits", "ends"), [(False, True), (True, False)])
def test_a_client_may_be_silent_while_it_waits_for_an_answer(waits: bool, ends: bool) -> None:
    patience = Patience(TIMES, 1_000)
    patience.heard(0, 1_050)
    assert patience.verdict(True, waits, 1_149) is None
    assert isinstance(patience.verdict(True, waits, 1_150), ClientIdle) == ends
    assert (patience.until_s(greeted=True) > 1_150) != ends
