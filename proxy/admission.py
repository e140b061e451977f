"""How many requests are under way, and whose.

With several API keys each of them may hold a multiple of the places that are free at the moment (dynamic
thresholds, A. Choudhury and E. Hahne, 1998): a key that is alone gets most of them, and whoever comes later
always finds some. And the more a key has under way already, the later its next request is served, so that a
key with few requests does not wait behind one with many.
"""

from collections import Counter

from proxy.errors import too_many_requests

SHARE = 4  # times the free places, for each key
RANKS = 64  # requests of a key beyond so many are all equally late


class Admission:
    def __init__(self, num_places: int, num_keys: int) -> None:
        self.num_places = num_places
        self.num_admitted = 0
        self._is_shared = num_keys > 1
        self._held: Counter[str] = Counter()  # by key

    def enter(self, key: str, count: int) -> None:
        """Take places for ``count`` sequences. Raises ApiError when there are none for this key."""
        num_free = self.num_places - self.num_admitted
        if count > num_free or (self._is_shared and self._held[key] + count > SHARE * (num_free - count + 1)):
            raise too_many_requests(self.num_places)
        self.num_admitted += count
        self._held[key] += count

    def leave(self, key: str, count: int) -> None:
        self.num_admitted -= count
        self._held[key] -= count
        if not self._held[key]:
            del self._held[key]

    def priority(self, key: str, wanted: int) -> int:
        """Of a request just admitted, as workers take it: those of ``wanted`` first, keys in turns among
        them."""
        return wanted * RANKS + min(self._held[key] - 1, RANKS - 1) if self._is_shared else wanted
