"""`pytest tests/transcripts --record` writes down what the machine says now; review the diff as code."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", action="store_true", help="record the transcripts anew")
