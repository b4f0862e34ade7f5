"""The tiers that a plan moves storages to; each opens when the first one leaves."""

from __future__ import annotations

from pathlib import Path

from memopt.enforcers.lookup import Tables
from memopt.enforcers.tiers.feedback import Feedback
from memopt.enforcers.tiers.host import BLOCK_BYTES
from memopt.enforcers.tiers.per_device import PerDevice, disk_tier, host_tier
from memopt.enforcers.tiers.swapped import Swapper
from memopt.plan import Plan, ScriptAction


def swapper_of(plan: Plan, tables: Tables, swap_dir: Path) -> Swapper | None:
    """What carries out the swaps of `plan`, if it has any."""
    wanted = {
        number: str(action.tier)
        for number, action in enumerate(tables.actions)
        if action.kind == "swap" and action.tier
    }
    if not wanted:
        return None
    tiers: dict[str, PerDevice] = {}
    if "disk" in wanted.values():
        tiers["disk"] = disk_tier(swap_dir)
    to_host = [action.size_bytes for action in tables.actions if action.tier == "host"]
    if to_host:
        tiers["host"] = host_tier((plan.host_bytes or sum(to_host)) + BLOCK_BYTES * len(to_host))
    return Swapper(tiers, wanted, Feedback(plan, tables) if plan.moments else None)


def home_tier(decision: ScriptAction, swap_dir: Path) -> PerDevice | None:
    """Where optimizer state is between steps, or the home of streamed weights; none where that is the device. It stays open for whoever
    reads what is there."""
    if decision.tier is None:
        return None
    return (
        disk_tier(swap_dir)
        if decision.tier == "disk"
        else host_tier(decision.away_bytes + decision.gradient_bytes)
    )
