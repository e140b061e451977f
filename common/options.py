"""From the classes in ``common/config.py`` to command line, environment and cluster file.

An option is looked for in this order:

1. the command line    ``--max-num-seqs 8``
2. the environment     ``BATON_MAX_NUM_SEQS=8``
3. the cluster file    ``max-num-seqs: 8`` (YAML, named by ``--config`` or ``BATON_CONFIG``); inside a section
                       ``proxy:``, ``prefill:`` or ``decode:`` it holds for processes of that role alone
4. the default in the class
"""

import argparse
import difflib
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, overload

from common import cluster_file
from common.config import ALL_CONFIGS, ConfigError
from common.option_values import Option, describe, options_of, read, write

OTHER_VARIABLES = {
    "BATON_CONFIG": "cluster file, as --config",
    "BATON_LOG_LEVEL": "debug, info, warning or error",
    "BATON_CACHE_DIR": "directory of downloaded and converted models; default: ~/.cache/baton",
    "BATON_NATIVE_ISA": "instruction set of the CPU kernels; default: the best that the machine has",
    "BATON_NATIVE_DIR": "where python -m kernels.native DIRECTORY put the CPU kernels; default: compiled",
    "BATON_URL": "server that baton complete talks to, as --url",
}

logger = logging.getLogger(__name__)

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")


class Given(NamedTuple):
    value: object
    place: str  # where it was given, for messages


@overload
def parse(
    classes: tuple[type[A]], argv: Sequence[str] | None = ..., prog: str = ..., role: str = ...
) -> tuple[A]: ...
@overload
def parse(
    classes: tuple[type[A], type[B]], argv: Sequence[str] | None = ..., prog: str = ..., role: str = ...
) -> tuple[A, B]: ...
@overload
def parse(
    classes: tuple[type[A], type[B], type[C]],
    argv: Sequence[str] | None = ...,
    prog: str = ...,
    role: str = ...,
) -> tuple[A, B, C]: ...
@overload
def parse(
    classes: tuple[type[A], type[B], type[C], type[D]],
    argv: Sequence[str] | None = ...,
    prog: str = ...,
    role: str = ...,
) -> tuple[A, B, C, D]: ...
@overload
def parse(
    classes: tuple[type[A], type[B], type[C], type[D], type[E]],
    argv: Sequence[str] | None = ...,
    prog: str = ...,
    role: str = ...,
) -> tuple[A, B, C, D, E]: ...
@overload
def parse(
    classes: tuple[type[A], type[B], type[C], type[D], type[E], type[F]],
    argv: Sequence[str] | None = ...,
    prog: str = ...,
    role: str = ...,
) -> tuple[A, B, C, D, E, F]: ...
def parse(
    classes: tuple[type[Any], ...], argv: Sequence[str] | None = None, prog: str = "baton", role: str = ""
) -> tuple[Any, ...]:
    """One instance of each of ``classes`` for a process of ``role`` (proxy, prefill, decode or none). What
    cannot work ends the process with one line on stderr and exit code 2."""
    try:
        given = collect(command_line(classes, prog), sys.argv[1:] if argv is None else argv, os.environ, role)
        return tuple(build(cls, given) for cls in classes)
    except ConfigError as error:
        sys.exit(refusal(prog, error))


def refusal(prog: str, error: ValueError) -> int:
    """Says on one line why the process cannot work as it was asked to, and gives the exit code for that."""
    print(f"{prog}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return 2


def command_line(classes: Iterable[type], prog: str, positional: str = "") -> argparse.ArgumentParser:
    """A parser of the options of ``classes``; ``positional`` names one that may be given without its flag."""
    parser = argparse.ArgumentParser(
        prog=prog, allow_abbrev=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--config", metavar="FILE", help="cluster file (YAML) with further options")
    for cls in classes:
        group = parser.add_argument_group((cls.__doc__ or cls.__name__).splitlines()[0].rstrip("."))
        for option in options_of([cls]).values():
            _add(group, option)
            if option.name == positional:
                parser.add_argument(
                    "positional", nargs="?", metavar=option.name.upper(), help=f"same as {option.flag}"
                )
    parser.set_defaults(positional_name=positional)
    return parser


def _add(group: "argparse._ArgumentGroup", option: Option) -> None:
    default = write(option, option.default)
    text = (f"{option.text} (default: {default})" if default else option.text).replace("%", "%%")
    if option.kind is bool:
        group.add_argument(option.flag, dest=option.name, action="store_const", const="true", help=text)
        group.add_argument(option.off_flag, dest=option.name, action="store_const", const="false")
    elif option.is_list:
        group.add_argument(option.flag, dest=option.name, action="append", metavar="A,B", help=text)
    else:
        group.add_argument(option.flag, dest=option.name, metavar=_placeholder(option), help=text)


def _placeholder(option: Option) -> str:
    kind = describe(option)
    return "{" + kind.replace(", ", ",") + "}" if "," in kind else {"number": "N", "text": "TEXT"}[kind]


def collect(
    parser: argparse.ArgumentParser, argv: Sequence[str], environment: Mapping[str, str], role: str = ""
) -> dict[str, Given]:
    """Every option that was given anywhere, the strongest place last asked."""
    everything = options_of(ALL_CONFIGS)
    arguments = _arguments(parser, argv)
    path = arguments.pop("config", None) or environment.get("BATON_CONFIG")
    given: dict[str, Given] = {}
    if path:
        given |= {name: Given(value, f"in {path}") for name, value in cluster_file.load(path, role).items()}
    warn_unknown(environment)
    given |= {
        name: Given(environment[option.variable], f"from {option.variable}")
        for name, option in everything.items()
        if option.variable in environment
    }
    return given | {name: Given(value, "") for name, value in arguments.items()}


def _arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    try:
        known, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name}: {error.message}") from error
    arguments = vars(known)
    if rest:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        what = "unknown option" if rest[0].startswith("-") else "unexpected argument"
        raise ConfigError(f"{what} {rest[0]}{_suggestion(rest[0].split('=')[0], flags)}")
    name, value = arguments.pop("positional_name"), arguments.pop("positional", None)
    if value is not None:
        if name in arguments:
            raise ConfigError(f"--{name} and {value!r} both name the {name}")
        arguments[name] = value
    return arguments


def warn_unknown(environment: Mapping[str, str]) -> None:
    """A line in the log for each variable that looks like an option but is none."""
    known = {option.variable for option in options_of(ALL_CONFIGS).values()} | set(OTHER_VARIABLES)
    for name in sorted(set(environment) - known):
        if name.startswith("BATON_"):
            logger.warning("environment variable %s matches no option%s", name, _suggestion(name, known))


def _suggestion(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def build(cls: type[A], given: Mapping[str, Given]) -> A:
    """An instance of ``cls``; values of other classes' options are left alone."""
    values = {}
    for name, option in options_of([cls]).items():
        if name in given:
            try:
                values[name] = read(option, given[name].value)
            except ConfigError as error:
                raise ConfigError(f"{option.flag}: {error} {given[name].place}".rstrip()) from error
    return cls(**values)


def to_argv(*configs: object) -> list[str]:
    """The command line from which a child builds equal ``configs``; secrets go by ``to_environment``."""
    words: list[str] = []
    for option, value in _changed(configs):
        if option.secret:
            continue
        if option.kind is bool:
            words.append(option.flag if value else option.off_flag)
        else:
            words.append(f"{option.flag}={write(option, value)}")
    return words


def to_environment(*configs: object) -> dict[str, str]:
    """The secrets among ``configs`` as environment variables."""
    return {option.variable: write(option, value) for option, value in _changed(configs) if option.secret}


def _changed(configs: Iterable[object]) -> Iterable[tuple[Option, Any]]:
    for config in configs:
        for option in options_of([type(config)]).values():
            value = getattr(config, option.name)
            if value != option.default:
                yield option, value
