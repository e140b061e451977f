import sys

from benchmarks.serve.command import main

sys.exit(main())
