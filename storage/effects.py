"""What apply asks of the leader. Losing an effect loses nothing: the state has it all (T3)."""

from dataclasses import dataclass

from holdfast.client.protocol.quick import quick


@quick
@dataclass(frozen=True, slots=True)
class WakeConsumers:
    """Something may be available now in this group."""

    queue_id: int
    group: str


@dataclass(frozen=True, slots=True)
class TouchSoon:
    """More is due in this queue than one command folds: propose a Touch."""

    queue_id: int


@dataclass(frozen=True, slots=True)
class ReapSoon:
    """Work of a delete, a purge or a seek is left to later entries: keep them coming."""

    is_waited_for: bool  # commands are refused until it is done, so there is to be no pause between these entries


@dataclass(frozen=True, slots=True)
class EndLeases:
    """All leases of this group are over: nothing about them needs a timer."""

    queue_id: int
    group: str


Effect = WakeConsumers | TouchSoon | ReapSoon | EndLeases
