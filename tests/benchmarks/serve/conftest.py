"""A real proxy with a worker that follows a script, for the load generator to be tried on."""

from tests.proxy.conftest import model, system

__all__ = ["model", "system"]
