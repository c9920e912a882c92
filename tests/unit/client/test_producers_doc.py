"""The examples of `docs/producers.md` run, in their order, against a real node."""

import re
from pathlib import Path

from holdfast.cluster.embedded import Node

PAGE = Path(__file__).parents[3] / "docs" / "producers.md"


def test_the_examples_run(tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    with Node(tmp_path / "node") as node:
        names: dict[str, object] = {"ADDRESSES": node.address}
        for number, block in enumerate(blocks, start=1):
            exec(compile(block, f"<block {number} of producers.md>", "exec"), names)
        names["client"].close()  # type: ignore[attr-defined]
