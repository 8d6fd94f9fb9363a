"""The entry point of `jaxpar`, which finds the command that the first word names; a mistake of the
user is a line and exit code 2.

Code that needs no JAX imports none: help, a version and a mistyped command take a tenth of a
second. Each command is a row of `COMMANDS`.
"""

from __future__ import annotations

import errno
import gc
import importlib
import itertools
import os
import re
import sys
import warnings
from typing import NamedTuple, NoReturn

from jaxpar.base.errors import UserError, short, suggest, visible
from jaxpar.base.process.early_signals import end_quietly, leave_on_signals
from jaxpar.base.version import jaxpar_version


class Command(NamedTuple):
    """A command: its text in the list of commands, and the module of `jaxpar.cli` that has its
    function, `NAME_command`.
    """

    text: str
    module: str = "commands"


COMMANDS = {
    "train": Command("train a config; the same command resumes"),
    "watch": Command(
        "a run in the terminal: progress, losses, speed; its profile by line of the model"
    ),
    "compare": Command("several runs: what differs in their settings, and their losses drawn"),
    "goodput": Command("what the time of a run went on, and how often to save", "goodput"),
    "verify": Command("compare a plan's loss and gradients with one device"),
    "generate": Command(
        "continue prompts with a run, a Hugging Face folder or a PEFT adapter", "trained"
    ),
    "eval": Command(
        "validation loss of a run or a Hugging Face folder, or tasks of lm-eval", "trained"
    ),
    "checkpoints": Command(
        "the checkpoints of a run, and whether they are as they were saved", "checkpoints"
    ),
    "convert": Command("to and from Hugging Face safetensors", "convert"),
    "prune": Command("a trained model, pruned at once from some text, as a new run", "prune"),
    "tokenize": Command("text to a .bin file of token ids"),
    "configs": Command("list the config presets"),
    "meshes": Command("list the mesh presets"),
    "show": Command("parameter table and a picture of the sharding, or of the pipeline's schedule"),
    "rehearse": Command(
        "compile the step for absent hardware: memory, time, exposed communication", "rehearse"
    ),
    "plan": Command(
        "the fastest layout of a config on absent hardware, and why it is this one", "plan"
    ),
    "compose": Command(
        "rehearse settings alone, in pairs and together: which add up, which cancel", "compose"
    ),
    "launch": Command(
        "run it on several machines: Ray here or on a cluster; scripts for Slurm, GKE, "
        "TPU VMs and SkyPilot",
        "launch",
    ),
    "sweep": Command(
        "run every combination of some settings under Ray Tune, or rehearse them", "launch"
    ),
    "bench": Command("the training step, or generation, beside PyTorch, in turns", "bench"),
    "doctor": Command("versions, devices, known-bad combinations", "doctor"),
}
_ORBAX_READING = "_read_array_index_and_device_put"
"""The coroutine that reads an array of a checkpoint, seen in orbax-checkpoint 0.12.8."""
_OUTPUT_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""The errors by which a disk refuses what a command prints."""
_HELP = ("-h", "--help", "help")


def main(argv: list[str] | None = None) -> int:
    """Run the command that the words name, and return its exit code.

    A `UserError` is one line on standard error and its exit code, which is 2 unless its class says
    another; a reader of the output that has gone is 141, and Ctrl-C is 130.

    Args:
      argv: the words behind `jaxpar`; None = the words of the process, which Ctrl-C then ends.

    Raises:
      KeyboardInterrupt: Ctrl-C, where `argv` is given.
      OSError: the system refused something that no command turned into a UserError.
    """
    if argv is None:
        say_once()
        if sys.argv[1:2] == ["train"]:
            leave_on_signals()
    try:
        try:
            return _command(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, where a reader that has gone can be told
            if argv is None:
                end_quietly()
                # at its end Python would look through all objects of JAX again, for two seconds
                gc.freeze()
    except UserError as error:
        fail(str(error))
        if error.ends_at_once and argv is None:
            sys.stderr.flush()
            os._exit(error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        if argv is not None:
            raise
        _end_interrupted()
    except BrokenPipeError:  # `| head` has read enough
        _say_no_more()
        return 141
    except OSError as error:
        if error.errno in _OUTPUT_FULL and error.filename is None:
            _say_no_more()
            return fail(
                f"what this command says cannot be written ({error.strerror}): free some space "
                "where its output goes, or send it elsewhere"
            )
        if error.errno != errno.ENAMETOOLONG:
            raise
        return fail(
            f"{short(str(error.filename))} is too long for the name of a file or folder: give a "
            "shorter one"
        )


def _say_no_more() -> None:
    """Send what is still unprinted nowhere; Python would write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_interrupted() -> NoReturn:
    print("jaxpar: interrupted", file=sys.stderr, flush=True)
    # not by way of Python's end, which waits for threads: one may be compiling for minutes
    os._exit(130)


def say_once() -> None:
    """Have Python print nothing about an error that a command tells in a line: where a checkpoint
    cannot be read, Orbax drops its other readings.
    """
    sys.unraisablehook = _unraisable
    dropped = f"coroutine '{_ORBAX_READING}' was never awaited"
    warnings.filterwarnings("ignore", dropped, RuntimeWarning)


def _unraisable(what: sys.UnraisableHookArgs) -> None:
    """Handle an error that Python cannot raise (`sys.unraisablehook`): a Ctrl-C that reaches Python
    inside a callback of the garbage collector, of which JAX has one, is a Ctrl-C too. Python would
    print it and go on.
    """
    if isinstance(what.exc_value, KeyboardInterrupt):
        _end_interrupted()
    if str(what.exc_value) == "Event loop is closed":
        return  # a thread of TensorStore, whose reading has failed and is told already
    if getattr(what.object, "__name__", "") == _ORBAX_READING:
        return
    sys.__unraisablehook__(what)


def _command(words: list[str]) -> int:
    """Run the command that the first word names; list them where none is named."""
    if words[:1] == ["--version"]:
        print(f"jaxpar {jaxpar_version()}")
        return 0
    if not words or words[0] in _HELP:
        width = max(map(len, COMMANDS))
        print("usage: jaxpar COMMAND ...   (jaxpar COMMAND --help lists its flags)\n")
        lines = [f"  {name:<{width}}  {command.text}" for name, command in COMMANDS.items()]
        print("\n".join(lines))
        return 0
    command, *rest = words
    if command not in COMMANDS:
        raise UserError(
            f"no command {command!r}{suggest(command, COMMANDS)}: jaxpar --help lists them"
        )
    if rest and command in ("configs", "meshes", "doctor"):
        if rest[0] in _HELP:
            print(f"usage: jaxpar {command}\n\n{COMMANDS[command].text}; takes no flags")
            return 0
        raise UserError(f"jaxpar {command} takes no arguments, found {' '.join(rest)}")
    if command in ("configs", "meshes"):
        return _list_presets(command)
    module = importlib.import_module(f"jaxpar.cli.{COMMANDS[command].module}")
    return getattr(module, f"{command}_command")(rest)


def fail(message: str) -> int:
    """Print a user's error on standard error, in one line even where a cause that it quotes had
    several, and return the exit code, 2.
    """
    print("jaxpar: error: " + visible(" ".join(message.split())), file=sys.stderr)
    return 2


def _list_presets(folder: str) -> int:
    """Print every preset with the first sentence of its opening comment."""
    from jaxpar.base.toml import presets

    found = presets(f"jaxpar.{folder}")
    width = max(map(len, found))
    for name, file in found.items():
        print(f"{name:<{width}}  {_first_sentence(file.read_text(encoding='utf-8'))}")
    print(f"\nuse: jaxpar train {'NAME' if folder == 'configs' else 'CONFIG --target NAME'}")
    return 0


def _first_sentence(text: str) -> str:
    """Return the first sentence of the comment that a file begins with, in one line."""
    comment = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    words = " ".join(line.removeprefix("# ") for line in comment)
    return re.split(r"(?<!et al\.)(?<=\.)\s", words, maxsplit=1)[0]


if __name__ == "__main__":
    sys.exit(main())
