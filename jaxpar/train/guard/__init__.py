"""What watches a training. To be read in this order: how a training fails (`failures`), and what is
done about steps that are not finite and loss that leaps (`judge`); what in such a step was the
first to go wrong (`named_counts`, `layer_by_layer`), and whether a device is to blame
(`nonfinite`); copies that differ (`replicas`), steps that never end (`watchdog`) and time that runs
out (`time_limit`).
"""

from jaxpar.train.guard.judge import Guard, spike_limit

__all__ = ["Guard", "spike_limit"]
