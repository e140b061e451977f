"""``python -m control_plane`` is the ``baton`` command."""

from control_plane.cli import main

main()
