"""``baton keygen FILE``: a new secret for all processes of a deployment, see --secret-file."""

import sys
from collections.abc import Sequence

from common.secret import Secret


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        wants_help = list(argv) in (["-h"], ["--help"])
        print("usage: baton keygen FILE", file=sys.stdout if wants_help else sys.stderr)
        return 0 if wants_help else 2
    try:
        Secret.new().save(argv[0])
    except OSError as error:
        print(f"baton keygen: error: {error}", file=sys.stderr)
        return 2
    print(f"{argv[0]}: a new secret; give it to every proxy and worker as --secret-file")
    return 0
