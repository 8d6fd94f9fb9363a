"""Refuses words that `gcloud` would refuse: the flags that each command takes and needs, as its
reference lists them. Other programs of the tests do what the command would do.
"""

from __future__ import annotations

import re
import sys

EVERYWHERE = {"--project", "--zone", "--quiet", "--format"}
TAKES = {
    "compute tpus queued-resources describe": set(),
    "compute tpus queued-resources delete": {"--force", "--async"},
    "compute tpus queued-resources create": {
        "--node-id",
        "--accelerator-type",
        "--runtime-version",
        "--spot",
    },
    "compute tpus tpu-vm ssh": {"--worker", "--command"},
    "compute tpus tpu-vm scp": {"--worker", "--recurse"},
    "secrets versions access": {"--secret"},
}
NEEDS = {
    "compute tpus queued-resources create": {
        "--node-id",
        "--accelerator-type",
        "--runtime-version",
    },
    "secrets versions access": {"--secret"},
}
WITHOUT_VALUE = {"--quiet", "--force", "--async", "--spot", "--recurse"}


def main(words: list[str]) -> int:
    line = " ".join(words)
    command = next((name for name in TAKES if line.startswith(name + " ")), "")
    if not command:
        print(f"gcloud has no such command: {line}", file=sys.stderr)
        return 2
    rest = words[len(command.split()) :]
    given = {word.partition("=")[0] for word in rest if word.startswith("--")}
    wrong = given - TAKES[command] - EVERYWHERE
    missing = NEEDS.get(command, set()) - given
    valueless = {
        word for word in rest if word.startswith("--") and not re.search(r"=.", word)
    } - WITHOUT_VALUE
    if wrong or missing or valueless:
        print(f"{command}: {wrong or missing or valueless}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
