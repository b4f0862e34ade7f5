"""The planning strategies by name. A new one is one file with a class like those here, and one line in its table."""

from __future__ import annotations

from difflib import get_close_matches

from memopt.advisors.counsel.buffer_sharing import BufferSharing
from memopt.advisors.counsel.cdma import Cdma
from memopt.advisors.counsel.counsel import Counsel
from memopt.advisors.counsel.ctdr import Ctdr
from memopt.advisors.counsel.megatron import Megatron
from memopt.advisors.counsel.zero_offload import ZeroOffload
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.strategy import Strategy
from memopt.advisors.strategies.autoswap import Autoswap
from memopt.advisors.strategies.autotm import Autotm
from memopt.advisors.strategies.capuchin import Capuchin
from memopt.advisors.strategies.checkmate import Checkmate
from memopt.advisors.strategies.dtr import Dtr
from memopt.advisors.strategies.flashneuron import Flashneuron
from memopt.advisors.strategies.gist import Gist
from memopt.advisors.strategies.modnn import Modnn
from memopt.advisors.strategies.rotor import Rotor
from memopt.advisors.strategies.sentinel import Sentinel
from memopt.advisors.strategies.sublinear import Sublinear
from memopt.advisors.strategies.superneurons import Superneurons
from memopt.advisors.strategies.swapadvisor import Swapadvisor
from memopt.advisors.strategies.tflms import Tflms
from memopt.advisors.strategies.vdnn import Vdnn
from memopt.advisors.strategies.vdnn_plus import VdnnPlus
from memopt.errors import UsageError

STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Auto(),
        Sublinear(),
        Rotor(),
        Checkmate(),
        Capuchin(),
        Vdnn(),
        Vdnn("all"),
        Vdnn("conv"),
        VdnnPlus(),
        Modnn(),
        Superneurons(),
        Autoswap(),
        Tflms(),
        Flashneuron(),
        Swapadvisor(),
        Autotm(),
        Sentinel(),
        Dtr(),
        Dtr("eqclass"),
        Dtr("local"),
        Dtr("megengine"),
        Gist(),
    )
}

COUNSELS: dict[str, Counsel] = {
    counsel.name: counsel for counsel in (BufferSharing(), ZeroOffload(), Cdma(), Megatron(), Ctdr())
}
"""Strategies that look at the whole run and tell what they find."""


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`, which plans for tensors. Raises `UsageError` that names the nearest ones."""
    if name in COUNSELS:
        raise UsageError(
            f"{name} advises on the run as a whole and makes no plan for tensors",
            try_=f"memopt advise PROFILE --strategy {name}",
        )
    if name not in STRATEGIES:
        known = [*STRATEGIES, *COUNSELS]
        raise UsageError(
            f"there is no strategy '{name[:60]}'",
            why=f"there are {', '.join(known)}",
            try_=" or ".join(get_close_matches(name, known)) or "memopt strategies",
        )
    return STRATEGIES[name]
