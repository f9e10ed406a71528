"""The pictures of the documentation, drawn as SVG.

::

    python docs/generate/pictures.py            # write docs/pictures/overview.svg, which the README shows
    python docs/generate/pictures.py FOLDER     # write all pictures

The site draws the others while it is built (``hooks.py``).
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
COMMITTED = HERE.parent / "pictures"
"""The README's picture: the only one in the repository."""

STYLE = """
  text { font: 14px system-ui, -apple-system, 'Segoe UI', sans-serif; fill: #1c2733; }
  .small { font-size: 12px; fill: #51606f; }
  .title { font-weight: 600; }
  .box { fill: #fff; stroke: #8a9aab; stroke-width: 1.2; }
  .line { stroke: #51606f; stroke-width: 1.4; fill: none; }
  .dash { stroke-dasharray: 5 4; }
  .a { fill: #cfe3f5; } .b { fill: #fbdcc0; } .c { fill: #d3ecd0; } .grey { fill: #eef1f4; }
  .none, .frame { fill: #fff; }
"""
CLUSTERS = "abc"


class Picture:
    """An SVG that grows shape by shape; coordinates in pixels from the upper left corner.

    Args:
        width, height: of the picture.
        title: what it shows, for readers who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.shapes: list[str] = []

    def box(
        self, x: float, y: float, width: float, height: float, text: str = "", kind: str = "none"
    ) -> None:
        """A rounded box with lines of text in its middle; ``kind`` is its colour."""
        self.shapes.append(
            f'<rect class="box {kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6"/>'
        )
        lines = text.split("\n") if text else []
        for place, line in enumerate(lines):
            down = y + height / 2 + 5 + 18 * (place - (len(lines) - 1) / 2)
            self.text(x + width / 2, down, line, "middle", "small" if place else "")

    def text(self, x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> None:
        """One line of text."""
        self.shapes.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], both: bool = False, kind: str = "") -> None:
        """An arrow along points."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        start = ' marker-start="url(#head)"' if both else ""
        self.shapes.append(f'<path class="line {kind}" d="{path}" marker-end="url(#head)"{start}/>')

    def dot(self, x: float, y: float, kind: str, radius: float = 6) -> None:
        """A client."""
        self.shapes.append(f'<circle class="box {kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}"/>')

    def svg(self) -> str:
        """The file."""
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="#51606f"/></marker>'
        )
        size = f'viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
                f"<title>{escape(self.title)}</title><style>{STYLE}</style><defs>{head}</defs>",
                f'<rect class="frame" width="{self.width}" height="{self.height}"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def overview() -> Picture:
    """rayfl in one picture: data, signatures, clusters, servers, clients, results."""
    p = Picture(860, 250, "Clients are clustered by signatures of their data and trained by a server each")
    p.text(90, 24, "clients with different data", "middle", "small")
    rng = np.random.default_rng(3)
    for place in range(15):
        x, y = 30 + 30 * (place % 5), 55 + 40 * (place // 5)
        p.dot(x, y + rng.uniform(-6, 6), CLUSTERS[int(rng.integers(3))])
    p.arrow((190, 95), (285, 95))
    p.text(237, 85, "signatures", "middle", "small")
    p.text(345, 24, "clusters", "middle", "small")
    for place, cluster in enumerate(CLUSTERS):
        p.box(290, 38 + 46 * place, 110, 38, "", "grey")
        for member in range(5):
            p.dot(308 + 18 * member, 57 + 46 * place, cluster)
        p.arrow((400, 57 + 46 * place), (478, 57 + 46 * place), both=True)
        p.box(480, 38 + 46 * place, 130, 38, f"local server {place}", cluster)
        p.arrow((610, 57 + 46 * place), (670, 57 + 46 * place), (700, 84 + 12 * place), both=True)
    p.text(440, 24, "models", "middle", "small")
    p.box(700, 72, 140, 50, "global server\nshared layers", "grey")
    p.arrow((770, 122), (770, 190))
    p.box(660, 192, 180, 44, "results\naccuracy, bytes, models", "none")
    p.text(
        30,
        218,
        "Same config and seed: same bits on one core, on many workers, and after a restart.",
        kind="small",
    )
    return p


def a_round() -> Picture:
    """The steps of a round, and where each of them runs."""
    p = Picture(820, 330, "The steps of a round")
    lanes = ("global server (driver)", "local servers", "client actors")
    for place, lane in enumerate(lanes):
        p.box(10, 20 + 100 * place, 800, 84, "", "grey")
        p.text(22, 42 + 100 * place, lane, kind="small")
    p.box(30, 54, 120, 40, "1 cohort\nwho takes part")
    p.box(170, 54, 130, 40, "2 plan\nstart models")
    p.arrow((150, 74), (170, 74))
    p.arrow((300, 74), (320, 74), (320, 274), (340, 274))
    p.box(340, 254, 130, 40, "3 local training\nblock by block", "a")
    p.arrow((470, 274), (490, 274), (490, 194))
    p.text(498, 245, "weighted sums", kind="small")
    p.box(425, 154, 130, 40, "4 mix\nW′ = A W", "b")
    p.arrow((555, 174), (580, 174))
    p.box(580, 154, 130, 40, "5 server step\nnext models", "c")
    p.box(500, 54, 140, 40, "global average\nevery κ rounds", "c")
    p.arrow((610, 154), (610, 94), both=True)
    p.text(602, 134, "common layers", "end", kind="small")
    p.box(680, 54, 120, 40, "6 test, record\ncheckpoint")
    p.arrow((690, 154), (690, 94))
    p.text(698, 134, "losses, norms", kind="small")
    return p


def _matrix(p: Picture, x: float, y: float, cells: Sequence[Sequence[str]], side: float = 34) -> None:
    for row, line in enumerate(cells):
        for column, cell in enumerate(line):
            kind, _, text = cell.partition(":")
            p.box(x + side * column, y + side * row, side, side, text, kind or "none")


def mixing() -> Picture:
    """W' = A W for two clusters."""
    p = Picture(760, 300, "Aggregation is a product: new models = A times the clients' trained models")
    p.text(30, 30, "new models W′", kind="title")
    _matrix(p, 30, 60, [["a:", "a:", "a:"], ["b:", "b:", "b:"]])
    p.text(30, 150, "K × P", kind="small")
    p.text(170, 100, "=", kind="title")
    p.text(200, 30, "mixing matrix A", kind="title")
    weights = [["a:⅔", "a:⅓", ":", ":", ":"], [":", ":", "b:¼", "b:¼", "b:½"]]
    _matrix(p, 200, 60, weights)
    p.text(200, 150, "K × M: row k says how model k", kind="small")
    p.text(200, 168, "is averaged from the M clients", kind="small")
    p.text(390, 100, "·", kind="title")
    p.text(420, 30, "trained models W", kind="title")
    _matrix(p, 420, 45, [["a:", "a:", "a:"], ["a:", "a:", "a:"], *[["b:", "b:", "b:"]] * 3])
    p.text(420, 238, "M × P, never in one place:", kind="small")
    p.text(420, 256, "each block sends A[:, block] W[block]", kind="small")
    for place, name in enumerate(("client 2", "client 7", "client 1", "client 4", "client 9")):
        p.text(530, 67 + 34 * place, name, kind="small")
    p.text(600, 67 + 17, "cluster 0: n = 40, 20", kind="small")
    p.text(600, 67 + 34 * 3, "cluster 1: n = 10, 10, 20", kind="small")
    return p


def blocks() -> Picture:
    """A cohort, cut into blocks, on actors."""
    p = Picture(
        780, 300, "A cohort is cut into blocks; idle actors take the next block; sums are added in order"
    )
    p.text(20, 28, "cohort, sorted by cluster and client", kind="title")
    for place in range(18):
        kind = "a" if place < 10 else "b"
        p.dot(32 + 22 * place, 54, kind)
    edges = (0, 4, 8, 10, 14, 18)
    for number, (begin, end) in enumerate(itertools.pairwise(edges)):
        x, width = 22 + 22 * begin, 22 * (end - begin) - 4
        p.box(x, 76, width, 30, f"block {number}" if width > 50 else f"{number}", "a" if end <= 10 else "b")
    p.arrow((220, 106), (220, 145))
    p.text(230, 134, "any idle actor takes the next block", kind="small")
    p.box(12, 146, 416, 56, "", "grey")
    p.box(20, 152, 190, 44, "client actor 0\nblocks 0, 3")
    p.box(230, 152, 190, 44, "client actor 1\nblocks 1, 2, 4")
    p.arrow((428, 174), (478, 130))
    p.arrow((428, 182), (478, 222))
    p.text(436, 240, "sums", kind="small")
    p.box(480, 100, 280, 52, "local server of cluster 0\n(block 0 + block 1) + block 2", "a")
    p.box(480, 200, 280, 52, "local server of cluster 1\nblock 3 + block 4", "b")
    p.text(20, 256, "Blocks depend on the config, not on the number of actors,", kind="small")
    p.text(
        20, 274, "and sums are taken in block order: any number of actors gives the same bits.", kind="small"
    )
    return p


def signatures() -> Picture:
    """Data, signatures, proximities, clusters: distances of the digits example's kind."""
    p = Picture(820, 300, "From data to signatures, to a matrix of distances, to clusters")
    rng = np.random.default_rng(0)
    kinds = [0, 0, 0, 0, 1, 1, 1, 2, 2]
    p.text(20, 28, "1 features", kind="title")
    for client, kind in enumerate(kinds):
        for dot in range(6):
            p.dot(30 + 16 * dot, 52 + 24 * client, CLUSTERS[kind], 5)
    p.text(160, 28, "2 signatures", kind="title")
    for client, kind in enumerate(kinds):
        p.box(165, 44 + 24 * client, 70, 16, "", CLUSTERS[kind])
        p.arrow((128, 52 + 24 * client), (163, 52 + 24 * client))
    p.text(140, 282, "d × p numbers each", kind="small")
    p.text(290, 28, "3 distances", kind="title")
    for row, mine in enumerate(kinds):
        for column, other in enumerate(kinds):
            near = mine == other
            shade = int((235 if not near else 60) + rng.uniform(-20, 20)) if row != column else 40
            p.shapes.append(
                f'<rect x="{290 + 22 * column}" y="{44 + 24 * row}" width="21" height="23" '
                f'fill="rgb({shade},{min(255, shade + 10)},{min(255, shade + 18)})"/>'
            )
    p.text(290, 282, "dark: similar", kind="small")
    p.text(530, 28, "4 tree, cut", kind="title")
    ends = [52 + 24 * client for client in range(9)]
    middles = []
    for kind in range(3):
        members = [end for end, each in zip(ends, kinds, strict=True) if each == kind]
        middle = sum(members) / len(members)
        for end in members:
            p.shapes.append(f'<path class="line" d="M530 {end} H570 V{middle:g}"/>')
        middles.append(middle)
    p.shapes.append(
        f'<path class="line" d="M570 {middles[0]:g} H650 V{middles[1]:g} M570 {middles[1]:g} H650"/>'
    )
    p.shapes.append(
        f'<path class="line" d="M570 {middles[2]:g} H680 V{(middles[0] + middles[1]) / 2:g} '
        f'H650"/><path class="line dash" d="M610 40 V262"/>'
    )
    p.text(600, 282, "threshold", kind="small")
    p.text(710, 28, "5 clusters", kind="title")
    for kind in range(3):
        p.box(710, middles[kind] - 20, 90, 40, f"cluster {kind}", CLUSTERS[kind])
    return p


def hierarchy() -> Picture:
    """Global server, local servers, clients; common and own layers."""
    p = Picture(760, 330, "The global server averages common layers; local servers average whole models")
    p.box(290, 16, 180, 50, "global server (GPS)\ncommon layers", "grey")
    for place, cluster in enumerate(CLUSTERS):
        x = 60 + 240 * place
        p.box(x, 130, 170, 66, "", "none")
        p.text(x + 85, 148, f"local server {place} (LPS)", "middle")
        p.box(x + 12, 158, 70, 28, "common", "grey")
        p.box(x + 88, 158, 70, 28, "own", cluster)
        p.arrow((x + 85, 130), (380, 66), both=True)
        for member in range(4):
            p.dot(x + 22 + 42 * member, 275, cluster, 10)
            p.arrow((x + 22 + 42 * member, 264), (x + 85, 198), both=True)
    p.text(560, 82, "every κ local rounds:", kind="small")
    p.text(560, 98, "the common layers", kind="small")
    p.text(226, 222, "every round:", kind="small")
    p.text(226, 238, "whole models", kind="small")
    p.text(60, 310, "clients of cluster 0", kind="small")
    p.text(300, 310, "clients of cluster 1", kind="small")
    p.text(540, 310, "clients of cluster 2", kind="small")
    return p


def exact() -> Picture:
    """What may differ between two runs, and what may not."""
    p = Picture(780, 250, "What changes the bits of a result and what does not")
    p.text(30, 30, "the same bits", kind="title")
    same = (
        "1, 2 or 64 workers",
        "inline or Ray",
        "a worker is killed",
        "stopped and resumed",
        "another finishing order",
    )
    for place, text in enumerate(same):
        p.box(30, 44 + 38 * place, 200, 30, text, "c")
    p.text(290, 30, "other bits, equal to rounding", kind="title")
    for place, text in enumerate(("another engine", "another CPU type", "CPU or GPU", "another PyTorch")):
        p.box(290, 44 + 38 * place, 200, 30, text, "b")
    p.text(550, 30, "another run", kind="title")
    for place, text in enumerate(("another seed", "another setting", "another block_size", "other data")):
        p.box(550, 44 + 38 * place, 200, 30, text, "a")
    return p


PICTURES: dict[str, Callable[[], Picture]] = {
    "overview": overview,
    "round": a_round,
    "mixing": mixing,
    "blocks": blocks,
    "signatures": signatures,
    "hierarchy": hierarchy,
    "exact": exact,
}
"""By the name of the file."""


def main(arguments: Sequence[str]) -> None:
    """Write the README's picture, or all of them to a folder."""
    folder = Path(arguments[0]) if arguments else COMMITTED
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES if arguments else ("overview",):
        (folder / f"{name}.svg").write_text(PICTURES[name]().svg(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
