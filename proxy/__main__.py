"""``python -m proxy``: the HTTP front end."""

import gc
import os
import sys

import uvloop

from common import logs, options
from common.config import ConfigError, EngineConfig, NetworkConfig, ProxyConfig, StopConfig, TraceConfig
from common.model_config import ModelError
from common.secret import secret_of
from common.tracing import tracer_of
from proxy.served_model import ServedModel
from proxy.server import check_certificate, listeners, serve

# Requests leave few cycles behind. By default all that are under way would be looked through for every few
# hundred objects that a burst of tokens makes.
THRESHOLDS = (10_000, 20, 100)


def main() -> int:
    """Exit code 2: it cannot work as asked to, for a reason that is told on one line."""
    logs.setup()
    config, engine, trace, network, stop = options.parse(
        (ProxyConfig, EngineConfig, TraceConfig, NetworkConfig, StopConfig), prog="proxy", role="proxy"
    )
    try:
        config.all_keys()
        check_certificate(config)
        secret = secret_of(network, config.control_host)
        tracer = tracer_of(trace, "proxy", f"proxy-{os.getpid()}")
        sockets = listeners(config)
        model = ServedModel.load(engine, config.tool_call_parser, config.reasoning_parser)
        gc.collect()
        gc.freeze()  # what is there now stays: no need to look through it again and again
        gc.set_threshold(*THRESHOLDS)
        uvloop.run(serve(config, stop, model, sockets, tracer, secret, network.discovery))
    except (ConfigError, ModelError, OSError) as error:
        return options.refusal("proxy", ConfigError(str(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
