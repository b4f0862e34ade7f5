"""The planning strategies by name. A new one is one file with a class like those here, and one line in its table."""

from __future__ import annotations

from memopt.advisors.auto import Auto
from memopt.advisors.autoswap import Autoswap
from memopt.advisors.autotm import Autotm
from memopt.advisors.capuchin import Capuchin
from memopt.advisors.checkmate import Checkmate
from memopt.advisors.dtr import Dtr
from memopt.advisors.flashneuron import Flashneuron
from memopt.advisors.gist import Gist
from memopt.advisors.modnn import Modnn
from memopt.advisors.rotor import Rotor
from memopt.advisors.sentinel import Sentinel
from memopt.advisors.strategy import Strategy
from memopt.advisors.sublinear import Sublinear
from memopt.advisors.superneurons import Superneurons
from memopt.advisors.swapadvisor import Swapadvisor
from memopt.advisors.tflms import Tflms
from memopt.advisors.vdnn import Vdnn
from memopt.advisors.vdnn_plus import VdnnPlus

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
