"""Starts runs: here, elsewhere and many at once, by engines that exist. Nothing here supervises a
process itself.

`local` is what each process of a run does, and all of `jaxpar train`. `gang` starts several
processes, and starts all again when one dies (Ray Train), with fewer machines by `elastic`;
`preemption` hands them a signal to stop, and `ray_cluster` is where they are.

`scripts` fills in what Slurm, GKE, TPU VMs and SkyPilot take (`templates/`): `script_run` says
where a run goes and what its hosts do, and `staging` which files are sent to them.

`sweep` runs a grid of settings (Ray Tune), and `compose` rehearses many configs and trains small
ones (`small_loss`). `other_compiler` rehearses with a compiler of another version.
"""
