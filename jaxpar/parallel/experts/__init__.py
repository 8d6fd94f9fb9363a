"""A mixture-of-experts MLP whose experts lie on different devices (`layer`), and who chooses whom:
the token (`routers`) or the expert (`expert_choice`).
"""

from jaxpar.parallel.experts.layer import (
    expert_mlp,
)
from jaxpar.parallel.experts.routers import (
    RouterSums,
)

__all__ = [
    "RouterSums",
    "expert_mlp",
]
