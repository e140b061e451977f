"""From a request and what is known of the workers to a choice, or to a refusal."""

import logging
import math
import random
from typing import NamedTuple

from common.messages import WorkerError
from proxy.cost import Prediction
from proxy.metrics import Metrics
from proxy.registry import Registry
from proxy.request import Request, RequestFailed
from proxy.router import Choice, Need, Router, Snapshot, Targets

logger = logging.getLogger(__name__)


class Routed(NamedTuple):
    choice: Choice
    need: Need
    snapshot: Snapshot  # what the choice was made from


class Chooser:
    """``refuses_misses``: requests whose targets cannot be met, as far as anybody can tell, are refused."""

    def __init__(
        self, registry: Registry, router: Router, metrics: Metrics, refuses_misses: bool = False
    ) -> None:
        self._registry = registry
        self._router = router
        self._metrics = metrics
        self._refuses_misses = refuses_misses

    def choose(self, request: Request) -> Routed | None:
        """None when nobody can serve it now. Raises RequestFailed where waiting would not help either."""
        snapshot, need = self._registry.snapshot(), self._need(request)
        choice = self._router.choose(snapshot, need)
        if choice is None:
            return None
        if request.has_overloaded(choice):
            raise RequestFailed(WorkerError("overloaded", "all workers are at their limit"))
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("request %s: %s", request.id, self._router.explain(snapshot, need, choice))
        routed = Routed(choice, need, snapshot)
        if self._refuses_misses and request.num_attempts == 0:
            self._refuse_miss(self.predict(routed), request.targets)
        return routed

    def predict(self, routed: Routed) -> Prediction:
        return self._router.predict(routed.snapshot, routed.need, routed.choice)

    def _need(self, request: Request) -> Need:
        """With all that policies may want to know."""
        naming = self._registry.block_naming()
        overlap = request.overlap(self._registry.index, *naming) if naming else {}
        return request.need(overlap, draws=(random.random(), random.random()))

    def _refuse_miss(self, told: Prediction, targets: Targets) -> None:
        late_s = told.ttft_s - targets.ttft_s if targets.ttft_s else 0.0
        slow_s = told.itl_s - targets.itl_s if targets.itl_s else 0.0
        if not told.is_measured or (late_s <= 0 and slow_s <= 0):
            return
        what = "first token" if late_s > 0 else "time between tokens"
        seconds, target = (told.ttft_s, targets.ttft_s) if late_s > 0 else (told.itl_s, targets.itl_s)
        self._metrics.refused.labels("slo").inc()
        text = f"the {what} would take {seconds:.3f} s, more than the target of {target:g} s"
        raise RequestFailed(WorkerError("overloaded", text), max(1, math.ceil(late_s)))
