"""This package says what a training step costs under a plan in closed form, without tracing it:
its seconds, and its bytes by part.

Its rooms, in the order in which they are read: `parts` has what an estimate consists of.
"""

from jaxpar.plan.closed_form.parts import Bytes, Estimate

__all__ = ["Bytes", "Estimate"]
