"""drawn-digits: digits drawn with random strokes, 28 x 28, a pure function of the seed, written as MNIST idx files.

Each digit is a set of polylines in the unit square. A sample bends them (jitter of the points), turns, shears, scales
and shifts them, draws them with a pen of random width and pressure, and adds dust. Only exact operations touch
pixels, so that another machine makes the same bytes.
"""

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

SIZE = 28
_CHUNK = 1000  # samples that share one random stream; a smaller set is a prefix of a larger one

Polyline = tuple[tuple[float, float], ...]
_O: Polyline = ((.5, .05), (.72, .15), (.8, .5), (.72, .85), (.5, .95), (.28, .85), (.2, .5), (.28, .15), (.5, .05))
# Ways to write each digit, x to the right and y down.
GLYPHS: tuple[tuple[tuple[Polyline, ...], ...], ...] = (
    ((_O,),),
    ((((.5, .05), (.5, .95)),), (((.3, .25), (.52, .05), (.52, .95)),)),
    ((((.22, .25), (.35, .08), (.62, .07), (.76, .25), (.7, .45), (.2, .93), (.8, .93)),),),
    ((((.25, .1), (.6, .07), (.75, .25), (.6, .45), (.42, .48), (.65, .52), (.78, .72), (.6, .93), (.22, .88)),),),
    (
        (((.62, .95), (.62, .05), (.18, .65), (.84, .65)),),
        (((.25, .08), (.22, .5), (.8, .5)), ((.72, .1), (.68, .95))),
    ),
    ((((.75, .07), (.3, .07), (.26, .42), (.58, .4), (.78, .62), (.64, .9), (.22, .9)),),),
    ((((.66, .06), (.4, .25), (.24, .6), (.32, .88), (.58, .94), (.76, .75), (.62, .54), (.3, .6)),),),
    (
        (((.2, .08), (.8, .08), (.42, .95)),),
        (((.2, .08), (.8, .08), (.42, .95)), ((.35, .5), (.75, .5))),
    ),
    (
        (
            ((.5, .06), (.7, .16), (.68, .36), (.5, .48), (.32, .36), (.3, .16), (.5, .06)),
            ((.5, .48), (.76, .62), (.74, .85), (.5, .95), (.26, .85), (.24, .62), (.5, .48)),
        ),
    ),
    ((((.74, .4), (.5, .52), (.27, .38), (.32, .14), (.56, .06), (.74, .2), (.74, .4), (.62, .95)),),),
)


def make(train: int, test: int, seed: int, out: Path) -> list[Path]:
    """Write both splits below `out` the way torchvision.datasets.MNIST(out) reads them; return the files."""
    folder = out / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, (split, count) in enumerate((("train", train), ("t10k", test))):
        images, labels = draw(count, seed, number)
        written += [
            _write_idx(folder / f"{split}-images-idx3-ubyte", images),
            _write_idx(folder / f"{split}-labels-idx1-ubyte", labels),
        ]
    return written


def draw(count: int, seed: int, split: int) -> tuple[Bytes, Bytes]:
    """Images [count, 28, 28] and labels [count] of one split, the same for the same arguments."""
    chunks = [_draw_chunk(np.random.default_rng([seed, split, chunk])) for chunk in range(-(-count // _CHUNK))]
    images, labels = zip(*chunks, strict=True)
    return np.concatenate(images)[:count], np.concatenate(labels)[:count]


def _draw_chunk(random: np.random.Generator) -> tuple[Bytes, Bytes]:
    labels = random.integers(0, 10, _CHUNK, dtype=np.uint8)
    way = random.integers(0, 2, _CHUNK)
    images = np.zeros((_CHUNK, SIZE * SIZE), dtype=np.uint8)
    for digit, ways in enumerate(GLYPHS):
        for index, glyph in enumerate(ways):
            chosen = np.flatnonzero((labels == digit) & (way % len(ways) == index))
            images[chosen] = _draw_glyph(glyph, len(chosen), random)
    return images.reshape(-1, SIZE, SIZE), labels


def _draw_glyph(glyph: tuple[Polyline, ...], count: int, random: np.random.Generator) -> Bytes:
    """`count` drawings of one glyph, uint8 [count, 784]."""
    points = np.concatenate([np.array(line) for line in glyph])
    ends = np.cumsum([len(line) for line in glyph])
    starts = [i for i in range(len(points) - 1) if i + 1 not in ends]
    placed = _place(points, count, random)
    distance = _distance(placed[:, starts], placed[:, [i + 1 for i in starts]])
    width = random.uniform(0.6, 1.6, (count, 1))
    pressure = random.uniform(150, 255, (count, 1))
    ink = np.clip(width - distance + 0.5, 0, 1) * pressure
    dust = random.integers(0, 70, ink.shape) * (random.integers(0, 8, ink.shape) == 0)
    return np.clip(ink + dust, 0, 255).astype(np.uint8)


def _place(points: Floats, count: int, random: np.random.Generator) -> Floats:
    """Bend and move the points of a glyph: [count, points, 2] in pixels."""
    bent = points - 0.5 + random.uniform(-0.055, 0.055, (count, *points.shape))
    angle, shear = random.uniform(-0.35, 0.35, count), random.uniform(-0.35, 0.35, count)
    width, height = random.uniform(10, 20, count), random.uniform(13, 21, count)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    x = (bent[..., 0] + shear[:, None] * bent[..., 1]) * width[:, None]
    y = bent[..., 1] * height[:, None]
    shift = random.uniform(-4, 4, (count, 1, 2)) + SIZE / 2
    return np.stack([cos * x - sin * y, sin * x + cos * y], axis=2) + shift


def _distance(starts: Floats, ends: Floats) -> Floats:
    """Distance of each pixel centre to the nearest of the segments [count, segments, 2]: [count, 784]."""
    y, x = np.divmod(np.arange(SIZE * SIZE), SIZE) + np.array(0.5)
    nearest = np.full((len(starts), SIZE * SIZE), np.inf)
    for segment in range(starts.shape[1]):
        ax, ay = starts[:, segment, :1], starts[:, segment, 1:]
        dx, dy = ends[:, segment, :1] - ax, ends[:, segment, 1:] - ay
        px, py = x - ax, y - ay
        along = np.clip((px * dx + py * dy) / np.maximum(dx * dx + dy * dy, 1e-9), 0, 1)
        px -= along * dx
        py -= along * dy
        np.minimum(nearest, px * px + py * py, out=nearest)
    return np.sqrt(nearest)


def _write_idx(path: Path, array: Bytes) -> Path:
    head = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.tobytes())
    return path
