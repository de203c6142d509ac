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
_O: Polyline = (
    (0.5, 0.05),
    (0.72, 0.15),
    (0.8, 0.5),
    (0.72, 0.85),
    (0.5, 0.95),
    (0.28, 0.85),
    (0.2, 0.5),
    (0.28, 0.15),
    (0.5, 0.05),
)
# Ways to write each digit, x to the right and y down.
GLYPHS: tuple[tuple[tuple[Polyline, ...], ...], ...] = (
    ((_O,),),
    ((((0.5, 0.05), (0.5, 0.95)),), (((0.3, 0.25), (0.52, 0.05), (0.52, 0.95)),)),
    ((((0.22, 0.25), (0.35, 0.08), (0.62, 0.07), (0.76, 0.25), (0.7, 0.45), (0.2, 0.93), (0.8, 0.93)),),),
    (
        (
            (
                (0.25, 0.1),
                (0.6, 0.07),
                (0.75, 0.25),
                (0.6, 0.45),
                (0.42, 0.48),
                (0.65, 0.52),
                (0.78, 0.72),
                (0.6, 0.93),
                (0.22, 0.88),
            ),
        ),
    ),
    (
        (((0.62, 0.95), (0.62, 0.05), (0.18, 0.65), (0.84, 0.65)),),
        (((0.25, 0.08), (0.22, 0.5), (0.8, 0.5)), ((0.72, 0.1), (0.68, 0.95))),
    ),
    ((((0.75, 0.07), (0.3, 0.07), (0.26, 0.42), (0.58, 0.4), (0.78, 0.62), (0.64, 0.9), (0.22, 0.9)),),),
    ((((0.66, 0.06), (0.4, 0.25), (0.24, 0.6), (0.32, 0.88), (0.58, 0.94), (0.76, 0.75), (0.62, 0.54), (0.3, 0.6)),),),
    (
        (((0.2, 0.08), (0.8, 0.08), (0.42, 0.95)),),
        (((0.2, 0.08), (0.8, 0.08), (0.42, 0.95)), ((0.35, 0.5), (0.75, 0.5))),
    ),
    (
        (
            ((0.5, 0.06), (0.7, 0.16), (0.68, 0.36), (0.5, 0.48), (0.32, 0.36), (0.3, 0.16), (0.5, 0.06)),
            ((0.5, 0.48), (0.76, 0.62), (0.74, 0.85), (0.5, 0.95), (0.26, 0.85), (0.24, 0.62), (0.5, 0.48)),
        ),
    ),
    ((((0.74, 0.4), (0.5, 0.52), (0.27, 0.38), (0.32, 0.14), (0.56, 0.06), (0.74, 0.2), (0.74, 0.4), (0.62, 0.95)),),),
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
    drawing: Bytes = np.clip(ink + dust, 0, 255).astype(np.uint8)
    return drawing


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
    distance: Floats = np.sqrt(nearest)
    return distance


def _write_idx(path: Path, array: Bytes) -> Path:
    head = struct.pack(f">BBBB{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(head + array.tobytes())
    return path
