"""One option of the configuration classes, and how its value is written as text.

The command line, the environment and the cluster file all hand over text (YAML scalars become text), so that
a value means the same wherever it was given. ``read`` undoes ``write``.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from common.config import ConfigError

_BYTES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


class Option(NamedTuple):
    """A field of a configuration class. ``kind`` is its type: a scalar, a Literal or a tuple."""

    name: str
    kind: Any
    default: Any
    text: str
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def off_flag(self) -> str:
        """What switches a bool off."""
        return "--no-" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "BATON_" + self.name.upper()

    @property
    def is_list(self) -> bool:
        return get_origin(self.kind) is tuple


def options_of(classes: Iterable[type]) -> dict[str, Option]:
    """The options of ``classes`` by field name; two classes must not share one."""
    found: dict[str, Option] = {}
    for cls in classes:
        kinds = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in found, f"{cls.__name__}.{field.name} is another class's option too"
            found[field.name] = Option(
                field.name, kinds[field.name], field.default, field.metadata["help"], field.metadata["secret"]
            )
    return found


def read(option: Option, given: object) -> Any:
    """The value of ``given``, a text or a YAML value; ConfigError says what was expected."""
    if option.is_list:
        items = given if isinstance(given, (list, tuple)) else [given]
        kind = get_args(option.kind)[0]
        return tuple(value for item in items for value in _list_item(option, kind, _text(item)))
    if isinstance(given, (list, dict)):
        raise ConfigError(f"expected one value, not {given!r}")
    return _scalar(option, option.kind, _text(given))


def write(option: Option, value: Any) -> str:
    """``value`` as text that ``read`` takes."""
    if option.is_list:
        return ",".join(_text(item) for item in value)
    return _text(value)


def describe(option: Option) -> str:
    """What kind of value the option takes, for help and docs."""
    if option.is_list:
        return "list"
    if get_origin(option.kind) is Literal:
        return ", ".join(get_args(option.kind))
    return {bool: "true, false", int: "number", float: "number", str: "text"}[option.kind]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _list_item(option: Option, kind: Any, text: str) -> list[Any]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if kind is not int:
        return [_scalar(option, kind, part) for part in parts]
    return [number for part in parts for number in _range(part)]


def _range(text: str) -> list[int]:
    """``3`` or ``0-3``, as taskset and cpusets write lists of cores."""
    match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", text)
    if match is None:
        raise ConfigError(f"expected numbers or ranges such as 0,2-3, not {text!r}")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ConfigError(f"expected the lower number first, not {text!r}")
    return list(range(first, last + 1))


def _scalar(option: Option, kind: Any, text: str) -> Any:
    if get_origin(kind) is Literal:
        return _choice(get_args(kind), text)
    if kind is int and option.name.endswith("_bytes"):
        return _size(text)
    readers: dict[Any, Callable[[str], Any]] = {bool: _truth, int: _whole, float: _real, str: str}
    return readers[kind](text)


def _choice(choices: tuple[str, ...], text: str) -> str:
    if text not in choices:
        raise ConfigError(f"expected one of {', '.join(choices)}, not {text!r}")
    return text


def _truth(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"expected true or false, not {text!r}")
    return text.lower() in _TRUE


def _whole(text: str) -> int:
    if re.fullmatch(r"[+-]?\d{1,18}", text) is None:
        raise ConfigError(f"expected a whole number, not {text!r}")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([kmg]i?)?b?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"expected a number of bytes such as 1073741824 or 1GiB, not {text!r}")
    return (
        round(float(match[1]) * _BYTES[(match[2] or "").lower()])
        if match[2] or "." in match[1]
        else int(match[1])
    )


def _real(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"expected a number, not {text!r}")
    return value
