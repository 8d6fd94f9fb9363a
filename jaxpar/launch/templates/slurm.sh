#!/bin/bash
# Trains {{config}} on {{target}}: {{hosts}} nodes of {{chips}} GPUs. Submit it from a folder that all nodes share:
#
#   sbatch job.sh          (--partition=P --account=A --time=T before job.sh, where they matter)
#
# The same job goes on after its time limit, a preemption or the loss of a node; cancelled, it ends.
#SBATCH --job-name={{name}}
#SBATCH --nodes={{hosts}}
#SBATCH --ntasks-per-node=1       # one process a node: it has all GPUs of it
#SBATCH --gpus-per-node={{chips}}
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300         # five minutes before the end: the run saves, and stops
#SBATCH --requeue                 # Slurm itself, after a preemption or the loss of a node
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

# source .venv/bin/activate       # where jaxpar[cuda] is installed
{{check_secrets}}
{{check_version}}
{{check_files}}
{{exports}}
export JAX_LOCAL_DEVICE_IDS={{devices}}  # under Slurm JAX gives a process one GPU, unless told otherwise
trap : TERM                       # this shell outlives the signal, to read what its step returns

command=({{command}})
container=({{container}})
for ((failures = 0; ; failures++)); do
  code=0
  srun --kill-on-bad-exit=0 --wait=120 "${container[@]}" "${command[@]}" || code=$?
  case $code in
    0) exit 0 ;;                  # the run is at its last step
    2) exit 2 ;;                  # the config, the data or the devices: the log says what to change
    130 | 143)                    # told to stop: its state is saved
      if [[ $(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID") == RUNNING ]]; then
        scontrol requeue "$SLURM_JOB_ID"
      fi                          # otherwise it was cancelled
      exit "$code" ;;
  esac                            # anything else is a crash: all processes start again from the last checkpoint
  ((failures < {{max_failures}})) || exit "$code"
done
