"""This package is the search that everything which `plan` chooses goes through.

A door says which keys are open and what their values may be. Closed forms price candidates where
they tell them apart; rehearsals correct the prices, until no candidate is left that should be
faster than the fastest that was rehearsed and fits. Candidates that no closed form tells apart are
all tried.

Its rooms, in the order in which they are read: `rounds` tries candidates, each once. `priced` is a
candidate with its price, `correct` corrects prices by rehearsals, and `finalists` chooses what is
rehearsed, and the winner.
"""

from jaxpar.plan.engine.correct import Correction, Rehearsed
from jaxpar.plan.engine.finalists import MARGIN, Measure, Space, rehearse_finalists, winner_of
from jaxpar.plan.engine.priced import Outcome, Price, Priced, priced
from jaxpar.plan.engine.rounds import one_by_one, try_rounds

__all__ = [
    "MARGIN",
    "Correction",
    "Measure",
    "Outcome",
    "Price",
    "Priced",
    "Rehearsed",
    "Space",
    "one_by_one",
    "priced",
    "rehearse_finalists",
    "try_rounds",
    "winner_of",
]
