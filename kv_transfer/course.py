"""In which pieces a sequence's blocks leave.

Blocks leave in their order, whole where they are computed. Of those that a step is computing the layers leave
that it has passed, then the next layers of the same blocks, and so on: when the step ends, only its last
layers are left.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """Some layers of a run of blocks."""

    first: int
    count: int
    layers: range


class Course:
    """Blocks up to ``num_whole`` are computed; those behind them, up to ``partial_end``, in their first
    ``partial_layers`` layers."""

    def __init__(self, num_layers: int, layer_bytes: int, piece_bytes: int) -> None:
        """``layer_bytes``: of one block. Pieces are cut to ``piece_bytes``, or one block's layers."""
        self.num_layers = num_layers
        self.num_whole = self.partial_end = self.partial_layers = 0
        self._layer_bytes = layer_bytes
        self._piece_bytes = piece_bytes
        # The part that is leaving: these layers of blocks from ``_start`` to ``_end``; those before ``_at``,
        # and earlier layers of all of them, are gone.
        self._start = self._at = self._end = 0
        self._layers = range(num_layers)

    def begin(self, first: int) -> None:
        """Leave out the blocks before the ``first``."""
        self._start = self._at = self._end = first

    def note_whole(self, num_blocks: int) -> None:
        self.num_whole = max(self.num_whole, num_blocks)

    def note_partial(self, end: int, num_layers: int) -> None:
        self.partial_end, self.partial_layers = end, num_layers

    @property
    def num_gone(self) -> int:
        """Leading blocks of which everything has left."""
        return self._at if self._layers.stop == self.num_layers else self._start

    def next(self, most_bytes: int) -> Piece | None:
        """What may leave now, of at most so many bytes."""
        if self._at == self._end:
            self._open_next()
        block_bytes = self.bytes_of(Piece(0, 1, self._layers))
        count = min(self._end - self._at, max(1, self._piece_bytes // block_bytes), most_bytes // block_bytes)
        return Piece(self._at, count, self._layers) if count > 0 else None

    def take(self, piece: Piece) -> None:
        """It leaves."""
        assert (piece.first, piece.layers) == (self._at, self._layers)
        self._at += piece.count

    def bytes_of(self, piece: Piece) -> int:
        return piece.count * len(piece.layers) * self._layer_bytes

    def _open_next(self) -> None:
        """Go on to further layers of the same blocks, or to the next blocks, if there are any."""
        done = self._layers.stop
        if done < self.num_layers:
            ready = self.num_layers if self.num_whole >= self._end else self.partial_layers
            if ready > done:
                self._at, self._layers = self._start, range(done, ready)
        elif self.num_whole > self._end:
            self._start, self._end = self._end, self.num_whole
            self._layers = range(self.num_layers)
        elif self.partial_end > self._end and self.partial_layers:
            self._start, self._end = self._end, self.partial_end
            self._layers = range(self.partial_layers)
