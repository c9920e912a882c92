"""The broker as a pytest fixture. Import it into your `conftest.py`; nothing is registered behind your back.

    from holdfast.client.testing.fixtures import broker  # noqa: F401

A plugin that loads itself would load in every test run of everybody who has Holdfast installed.
"""

from collections.abc import Iterator

import pytest

from holdfast.client.testing.broker import Broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    """An empty broker for this test; the clients that it gives end with it."""
    with Broker() as broker:
        yield broker
