import subprocess
import sys

import pytest

from common.config import ConfigError, TraceConfig
from common.tracing import tracer_of

QUIET = """
import sys
import proxy.server, common.tracing
from common.config import TraceConfig
assert common.tracing.tracer_of(TraceConfig(), "proxy", "proxy-1") is None
assert not [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
"""


def test_nothing_is_loaded_where_no_traces_are_wanted() -> None:
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint.*baton-serve\[traces\]"):
        tracer_of(TraceConfig(otlp_endpoint="http://127.0.0.1:4318"), "proxy", "proxy-1")


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="otlp-endpoint"):
        TraceConfig(otlp_endpoint="localhost:4318")
