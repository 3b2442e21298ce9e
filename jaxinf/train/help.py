"""The trainer's help: its flags in groups, and what other programs' names are here.

Invariant: each flag is in one group.
"""

import argparse
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxinf.command_line import UsageError, flags_of
from jaxinf.train.config import TrainConfig
from jaxinf.train.options import GROUPS, Options

PROGRAM = "python -m jaxinf.train"

_COMMON = (
    "data tokenizer model preset from steps batch-size seq-len learning-rate store "
    "mode memory"
).split()

_OTHER_NAMES = {  # of other programs, and what to write instead
    "lr": "--learning-rate",
    "num-epochs num-train-epochs": "--epochs",
    "max-steps num-steps max-iters": "--steps",
    "gradient-accumulation-steps": "--micro-batches, the parts of a --batch-size",
    "per-device-train-batch-size": "--batch-size, that of all devices together",
    "output-dir out-dir": "--store for the state, --log-dir for logs",
    "model-name-or-path": "--from DIR, or for new weights --model and --preset",
    "dataset train-file": "--data PATH",
    "max-length max-seq-length block-size": "--seq-len",
    "weight-decay": "--optimizer-args weight_decay=0.1",
    "lr-scheduler-type": "--schedule",
    "max-grad-norm grad-clip": "--clip-norm",
    "bf16 fp16": "--dtype bfloat16, for params --param-dtype, too",
    "gradient-checkpointing remat": "--policy recompute",
    "eval-steps eval-interval": "--eval-every",
    "save-steps save-interval": "--checkpoint-every",
    "resume resume-from-checkpoint": "--store alone, which resumes",
    "restore": "jaxinf checkpoint restore STORE NAME before the run",
    "report-to tensorboard wandb": "--track tensorboard",
    "model-config": "--preset FILE.json",
    "lora-alpha lora-r": "--lora RANK,alpha=A",
    "num-processes nproc-per-node": "--distributed HOST:PORT,N,I",
    "replan": "--elastic",
}


def check_names(words: Sequence[str]) -> None:
    """Refuses flags of other programs.

    Raises:
      UsageError: says what to write instead.
    """
    advice = {
        f"--{name}": advice
        for names, advice in _OTHER_NAMES.items()
        for name in names.split()
    }
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in advice:
            raise UsageError(f"{name}: not known; write {advice[name]}")


def started_as() -> str:
    """Returns the command that started this process, as it runs when pasted."""
    started = Path(sys.argv[0])
    if started.name == "jaxinf":
        return f"{installed('jaxinf')} train"
    module = "jaxinf train" if started.parent.name == "jaxinf" else "jaxinf.train"
    return f"{installed(Path(sys.executable).name)} -m {module}"


def installed(name: str) -> str:
    """Returns what starts a program that is installed beside this Python."""
    path = Path(sys.executable).with_name(name)
    is_other = path.exists() and shutil.which(name) != str(path)
    return near(path) if is_other else name


def near(path: Path) -> str:
    """Returns a path as a word of a shell, from here if it is below."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if here in path.parents else path))


def make_parser(prog: str = PROGRAM, own: type[Any] | None = None) -> Any:
    """Returns an `ArgumentParser` that has the flags in groups, for help alone.

    Args:
      own: flags of a command beside the trainer's, which are its first group.
    """
    parser, flags = _parser_of(TrainConfig, prog)
    parser._action_groups = []
    named = {flag.field.name: flags[flag.name] for flag in flags_of(Options)}
    groups, title = dict[str, list[Any]](), ""
    for field, action in named.items():
        title = GROUPS.get(field, title)
        groups.setdefault(title, []).append(action)
    if own is not None:
        of_command, own_flags = _parser_of(own, prog, tyro.conf.FlagCreatePairsOff)
        parser.description = of_command.description
        groups = {prog.split()[-1]: [*own_flags.values()], **groups}
    for title, actions in groups.items():
        parser.add_argument_group(title)._group_actions = actions
    return parser


def _parser_of(command: type[Any], prog: str, *how: Any) -> tuple[Any, dict[str, Any]]:
    """Returns tyro's parser of a command, and the command's flags by name."""
    with warnings.catch_warnings():
        # tyro has no other way to the flags; pyproject.toml bounds its version.
        warnings.simplefilter("ignore", DeprecationWarning)
        parser: Any = tyro.extras.get_parser(command, prog=prog, config=how)
    actions = [action for action in parser._actions if action.dest != "help"]
    for action in actions:  # a metavar says itself that values repeat
        action.nargs = action.nargs and None
    return parser, {one.option_strings[0].removeprefix("--"): one for one in actions}


def help_of(
    words: Sequence[str], prog: str = PROGRAM, own: type[Any] | None = None
) -> str:
    """Returns the help that a command line asks for, or nothing; see `make_parser`."""
    is_all = "--help-all" in words
    if not is_all and not {"-h", "--help"} & {*words}:
        return ""
    parser = make_parser(prog, own)
    lines = argparse.HelpFormatter(parser.prog, max_help_position=26)
    lines.add_text(f"usage: {parser.prog} [FLAGS]")
    for text in re.split(r"\n\s*\n", parser.description):
        lines.add_text(text)
    for group in parser._action_groups:
        actions = group._group_actions
        if group.title in GROUPS.values() and not is_all:
            actions = [x for x in actions if x.option_strings[0][2:] in _COMMON]
        lines.start_section(group.title)
        lines.add_arguments(actions)
        lines.end_section()
    if not is_all:
        lines.add_text("--help-all shows all flags.")
    return lines.format_help()
