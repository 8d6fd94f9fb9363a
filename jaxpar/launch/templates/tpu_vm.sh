#!/bin/bash
# Trains {{config}} on {{target}}: a slice of {{hosts}} TPU VMs. Run it where gcloud is set up; it waits for the end:
#
#   PROJECT=my-project ZONE=us-east5-a {{share}}bash job.sh
#
# {{share_note}}
set -euo pipefail
: "${PROJECT:?the Google Cloud project}" "${ZONE:?the zone, such as us-east5-a}"{{share_needed}}
name={{name}}
where=(--project="$PROJECT" --zone="$ZONE")
queue=(gcloud compute tpus queued-resources)
train={{quoted_command}}

state() { "${queue[@]}" describe "$name" "${where[@]}" --format='value(state.state)' 2>/dev/null || true; }
on_hosts() { gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --command="$2"; }
send_to_hosts() { gcloud compute tpus tpu-vm scp --recurse "$1" "$name:$2" "${where[@]}" --worker=all; }
release() { "${queue[@]}" delete "$name" "${where[@]}" --force --quiet; }

create() {
  "${queue[@]}" create "$name" "${where[@]}" --node-id="$name" {{spot}} \
    --accelerator-type={{slice}} --runtime-version={{runtime}}
  until [[ $(state) == ACTIVE ]]; do
    case $(state) in FAILED | SUSPENDED) return 1 ;; esac
    sleep 30
  done
  {{send_files}}
  {{package_note}}
  on_hosts all "{{mount}}{{setup}}"
}

trap release EXIT  # the slice is paid for by the second
create
for ((failures = 0; ; failures++)); do
  # ssh to several hosts does not hand on their exit code, so each keeps it
  on_hosts all "$train; echo \$? > /tmp/jaxpar_code" || true
  code=$(on_hosts 0 "cat /tmp/jaxpar_code") || code=255
  case $code in 0 | 2) exit "$code" ;; esac  # at its last step; or there is something for you to change
  if [[ $(state) != ACTIVE ]]; then          # preempted: another slice goes on from the last checkpoint
    release
    create
    ((failures--)) || true
  fi
  ((failures < {{max_failures}})) || exit "$code"
done
