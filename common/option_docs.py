"""The page ``docs/configuration.md``, written from the configuration classes."""

from collections.abc import Iterator

from common.config import ALL_CONFIGS
from common.option_values import Option, describe, options_of, write
from common.options import OTHER_VARIABLES

_OPENING = """\
# Configuration

<!-- Written by `python -m common.option_docs > docs/configuration.md`; a test compares. -->

An option can be given in four places; the first one that has it counts:

1. on the command line: `--max-num-seqs 8`; switches are `--checksums` and `--no-checksums`
2. in the environment: `BATON_MAX_NUM_SEQS=8`, switches `true` or `false`
3. in a cluster file named by `--config` or `BATON_CONFIG`: `max-num-seqs: 8`
4. its default

Lists are separated by commas (`--cores 0-3,6`) or given several times. Bytes may have a unit (`512MiB`,
`2GB`). A value that cannot work ends the process with one line that names the option, and exit code 2.

## Cluster file

YAML. What stands outside the sections holds for all processes, a section holds for processes of that role:

```yaml
model: smollm2-135m-instruct
max-model-len: 4096
prefill:
  workers: 2                      # how many baton serve starts; --prefill 2 on the command line
  max-num-batched-tokens: 2048
decode:
  workers: 1
  max-num-seqs: 128
proxy:
  workers: 1                      # processes that share the port; --proxy-workers
  port: 8000
```

`prefill: 3` and `decode: 3` are short for sections that say `workers: 3` alone.
"""

_OTHER = """
## Other environment variables

| variable | meaning |
| --- | --- |
"""


def page() -> str:
    return "".join(
        [_OPENING, *_sections(), _OTHER, *(f"| `{name}` | {text} |\n" for name, text in _others())]
    )


def _others() -> list[tuple[str, str]]:
    return sorted(OTHER_VARIABLES.items())


def _sections() -> Iterator[str]:
    for cls in ALL_CONFIGS:
        yield f"\n## {_title(cls)}\n\n| option | environment | default | values | meaning |\n"
        yield "| --- | --- | --- | --- | --- |\n"
        for option in options_of([cls]).values():
            yield _row(option)


def _title(cls: type) -> str:
    return (cls.__doc__ or cls.__name__).splitlines()[0].rstrip(".")


def _row(option: Option) -> str:
    default = write(option, option.default)
    shown = f"`{default}`" if default else ""
    return f"| `{option.flag}` | `{option.variable}` | {shown} | {describe(option)} | {option.text} |\n"


if __name__ == "__main__":
    print(page(), end="")
