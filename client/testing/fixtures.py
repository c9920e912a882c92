"""The broker as pytest fixtures. Import what you use into your `conftest.py`; nothing is registered behind your back.

    from holdfast.client.testing.fixtures import broker, client  # noqa: F401

A plugin that loads itself would load in every test run of everybody who has Holdfast installed.
"""

from collections.abc import Iterator

import pytest

from holdfast.client.blocking import Client
from holdfast.client.testing.broker import Broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    """An empty broker for this test."""
    with Broker() as broker:
        yield broker


@pytest.fixture
def client(broker: Broker) -> Client:
    """A client of that broker; it ends with it."""
    return broker.client()
