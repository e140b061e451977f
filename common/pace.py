"""How fast an engine is: what proxies predict waiting times from."""

from collections.abc import Sequence

from common.messages import Pace

MEMORY = 0.9  # how much of what is known a further step leaves
LEAST_SHARE = 0.25  # of a step with prompts and single tokens in it that prompts take
LEAST_TOKENS = 32  # of prompts in a step that tells how fast they are: what fewer take is the step's doing
OUTLIER = 2.0  # a step that took longer than so many usual ones was interrupted, and counts as so many


class Stopwatch:
    """Averages over the latest steps, prompts weighted by their tokens. Written by the engine's thread; a
    ``pace`` once read does not change."""

    def __init__(self, step_tokens: int = LEAST_TOKENS) -> None:
        """``step_tokens``: what a step holds at most."""
        self.pace = Pace()
        self._least_tokens = min(LEAST_TOKENS, step_tokens)
        self._num_tokens = self._prefill_s = 0.0

    def note(self, num_tokens: Sequence[int], duration_s: float) -> None:
        """A step computed so many tokens of each of its sequences."""
        if duration_s <= 0:
            return
        prefill, step_s = self.pace.prefill_tokens_per_s, self.pace.step_s
        num_prompt_tokens = sum(n for n in num_tokens if n > 1)
        if max(num_tokens) == 1:
            usual_s = min(duration_s, OUTLIER * step_s)
            step_s = MEMORY * step_s + (1 - MEMORY) * usual_s if step_s else duration_s
        elif num_prompt_tokens >= self._least_tokens:
            if min(num_tokens) == 1:  # what a step of these alone takes is not the prompts' doing
                duration_s = max(duration_s - step_s, LEAST_SHARE * duration_s)
            self._num_tokens = MEMORY * self._num_tokens + num_prompt_tokens
            self._prefill_s = MEMORY * self._prefill_s + duration_s
            prefill = self._num_tokens / self._prefill_s
        self.pace = Pace(prefill, step_s)
