"""A mixture-of-experts MLP whose experts lie on different devices.

In the order in which to read: `layer` sends tokens to their experts and brings the results back;
either the tokens choose their experts (`token_choice`) or the experts their tokens
(`expert_choice`), and `routers` has the parts that both need; `expert_products` multiplies rows by
the weights of their experts.
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
