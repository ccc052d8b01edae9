"""One turn: its loop and limits, the calls of its replies, and what is said to it while it runs."""

from boxmaker.turn.loop import CLEANUP_S, TurnOutcome, figures_of, run_turn
from boxmaker.turn.runtime import Emit, Runtime

__all__ = ["CLEANUP_S", "Emit", "Runtime", "TurnOutcome", "figures_of", "run_turn"]
