"""The release, tried as a user has it: `python tests/installed.py` builds the sdist, and the wheel
from the sdist, installs the wheel into an empty environment away from this repository, and runs the
demo there.

It prints how long a user waits from `pip install` to the first loss. `--extras hf,data` installs
extras too, and `--steps 20` shortens the demo.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=0, help="steps of the demo; 0 = all of them")
    parser.add_argument("--extras", default="", help="extras to install, such as hf,data")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT]
        built = subprocess.run(
            build, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        assert built.returncode == 0, built.stdout
        (sdist,), (wheel,) = folder.glob("dist/*.tar.gz"), folder.glob("dist/*.whl")
        print(
            f"{sdist.name} {sdist.stat().st_size:,} bytes, {wheel.name} "
            f"{wheel.stat().st_size:,} bytes"
        )
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv/bin/python"
        began = time.monotonic()
        if args.extras:
            wanted = f"{wheel}[{args.extras}]"
        else:
            wanted = str(wheel)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", wanted],
            check=True,
            cwd=folder,
        )
        print(f"pip install took {time.monotonic() - began:.0f} s", flush=True)
        run_demo(folder, args.steps, began)


def run_demo(folder: Path, steps: int, began: float) -> None:
    """Run the demo in `folder` with the environment there; `began` is when the user's wait
    began.
    """
    if steps:
        flags = ["--train.steps", str(steps), "--train.warmup_steps", str(min(10, steps - 1))]
    else:
        flags = []
    # Nothing of the repository or of this process's own environment: only what a login shell has.
    clean = {key: os.environ[key] for key in ("HOME", "PATH", "LANG") if key in os.environ}
    clean |= {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONUNBUFFERED": "1"}
    command = [folder / "venv/bin/jaxpar", "train", "tiny", *flags]
    first = None
    with subprocess.Popen(
        command, cwd=folder, env=clean, stdout=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            print(f"  {line.rstrip()}", flush=True)
            if first is None and line.startswith("step "):
                first = time.monotonic() - began
                print(f"from pip install to the first loss: {first:.0f} s", flush=True)
    assert demo.returncode == 0, f"the demo ended with {demo.returncode}"
    assert first is not None, "the demo printed no loss"
    assert (folder / "runs/tiny/loss.png").is_file()
    where = [
        folder / "venv/bin/python",
        "-c",
        "import jaxpar; print(jaxpar.__version__, jaxpar.__file__)",
    ]
    said = subprocess.run(
        where, check=True, cwd=folder, env=clean, capture_output=True, text=True
    ).stdout
    assert str(folder) in said, said
    print(f"installed: {said.split()[0]}")


if __name__ == "__main__":
    main()
