"""What compiled programs reach of a chip's peaks, which none reaches whole: figures that were
measured, in the chip's file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxpar.base.errors import UserError, reading
from jaxpar.base.toml import from_toml


@dataclass(frozen=True)
class AttentionShare:
    """What a kernel of attention reaches at one head_dim and length, as shares of the peak of its
    dtype. Of causal attention half of the scores count; the backward counts as five matmuls where
    the forward has two, whatever it computes again.
    """

    kernel: str = ""
    """`cudnn`, `pallas_gpu` or `splash`."""
    head_dim: int = 0
    tokens: int = 0
    """The keys that a query may see at most: the length, or the window."""
    forward: float = 1.0
    backward: float = 1.0


@dataclass(frozen=True)
class Prices:
    """What a compiled program reaches of the chip's peaks, which no program reaches whole; 1 = no
    figure.
    """

    matmul: float = 1.0
    """The share of the peak of 16 and 8 bits that matmuls reach."""
    matmul_float32: float = 1.0
    """The share of the peak of float32, on GPUs in TF32."""
    memory: float = 1.0
    """The share of the memory's bandwidth that fusions reach."""
    copies: float = 1.0
    """The share of the memory's bandwidth that copies reach, which compute nothing beside."""
    host_link: float = 1.0
    """The share of the host link's bandwidth that copies reach."""
    hidden: float = 0.0
    """The seconds that compute loses to each second of a collective beside it, which takes cores
    and bandwidth of the memory."""
    compute: float = 1.0
    """The seconds that compute takes to each second that the other prices give it: what is fitted
    on measured steps, here or by `--measured`."""
    attention: tuple[AttentionShare, ...] = ()

    def attention_share(self, kernel: str, head_dim: int, tokens: int) -> AttentionShare | None:
        """Look up what a kernel of attention reaches.

        Between two lengths the time of a FLOP is linear in one over the length, since what a tile
        of queries costs beside its keys is the same at any length. Beyond the lengths that are
        there the last one counts, and of the head_dims the nearest.

        Returns:
          The shares at this head_dim and length; None where the kernel has no figures.
        """
        rows = [row for row in self.attention if row.kernel == kernel]
        if not rows:
            return None
        nearest = min((row.head_dim for row in rows), key=lambda dim: (abs(dim - head_dim), -dim))
        rows = sorted((row for row in rows if row.head_dim == nearest), key=lambda row: row.tokens)
        below = next((row for row in reversed(rows) if row.tokens <= tokens), rows[0])
        above = next((row for row in rows if row.tokens >= tokens), rows[-1])
        if below.tokens == above.tokens:
            return below
        part = (1 / below.tokens - 1 / tokens) / (1 / below.tokens - 1 / above.tokens)

        def between(first: float, second: float) -> float:
            return 1 / ((1 - part) / first + part / second)

        return AttentionShare(
            kernel,
            head_dim,
            tokens,
            between(below.forward, above.forward),
            between(below.backward, above.backward),
        )


def read_prices(file: Path) -> Prices:
    """Read the prices of a GPU that `make gpu PIECES=prices` has measured.

    Raises:
      UserError: there is no such file, a key is unknown, or a share is not between 0 and 1.
    """
    with reading(file):
        text = file.read_text(encoding="utf-8")
    prices = from_toml(Prices, text, str(file))
    shares = {
        name: getattr(prices, name)
        for name in ("matmul", "matmul_float32", "memory", "copies", "host_link")
    }
    for row in prices.attention:
        shares[f"attention of {row.kernel}, forward"] = row.forward
        shares[f"attention of {row.kernel}, backward"] = row.backward
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise UserError(f"{file}: {name} = {share} is no share of a peak: try 0.8")
    return prices
