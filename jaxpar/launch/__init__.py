"""Starts runs: here, elsewhere and many at once, by engines that exist. Nothing here supervises a
process itself.

`local` is what each process of a run does, and all of `jaxpar train`. `gang` starts several
processes, and starts all again when one dies (Ray Train); `sweep` runs a grid of settings (Ray
Tune); `scripts` fills in what Slurm, GKE, TPU VMs and SkyPilot take (`templates/`).
"""
