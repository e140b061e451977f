import signal
import subprocess
import sys

import psutil

from benchmarks.server import free_port

PROGRAM = """
import sys, time
from benchmarks.server import running

port = int(sys.argv[1])
server = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
with running(server, port, "/"):
    print("ready", flush=True)
    time.sleep(600)
"""
TIMEOUT_S = 60.0


def test_a_benchmark_that_is_told_to_end_takes_along_what_it_has_started() -> None:
    command = [sys.executable, "-c", PROGRAM, str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    left = psutil.wait_procs(started, TIMEOUT_S)[1]
    assert not left
