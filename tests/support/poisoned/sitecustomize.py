"""Python runs this at its start where this folder is in PYTHONPATH: from then on nothing can be unpickled (R2)."""

import pickle
from typing import Any, NoReturn


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("something was unpickled")


class _Refusing:
    __init__ = _refuse


for _name in ("load", "loads", "_load", "_loads"):
    setattr(pickle, _name, _refuse)
setattr(pickle, "Unpickler", _Refusing)  # noqa: B010
setattr(pickle._Unpickler, "__init__", _refuse)  # noqa: B010  # pysyncobj changes its table, so the class stays
