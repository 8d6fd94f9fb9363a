"""The bytes of a teacher that runs beside a training."""

from __future__ import annotations

from jaxpar.base.layout.placements import local_bytes
from jaxpar.train.experiment import Experiment


def teacher_bytes(experiment: Experiment) -> int:
    """Count the bytes of a device that the parameters of a teacher take which runs beside the
    training; 0 where none does.

    Raises:
      UserError: the teacher's folder has no model, or its mesh does not fit the devices.
    """
    if not experiment.config.distill.teacher:
        return 0
    # A teacher needs data to be asked, which a program without them need not be able to read.
    from jaxpar.train.distil.answers import runs_beside, teacher_experiment

    if not runs_beside(experiment.config):
        return 0
    return local_bytes(teacher_experiment(experiment).state.params)
