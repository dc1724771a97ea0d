"""Where the names of points go so that they cover neither each other nor other points. Pure."""

from __future__ import annotations

from collections.abc import Sequence

Box = tuple[float, float, float, float]  # left, bottom, right, top; inches
CHARACTER, LINE = 0.072, 0.14  # inches of one character and of one line at 8.5 pt
GAP = 0.1  # between a point and its name


def place_labels(
    points: Sequence[tuple[float, float]], texts: Sequence[str], frame: Box, obstacles: Sequence[Box] = ()
) -> list[tuple[float, float]]:
    """Lower left corner of each name: of eight places around its point the one that covers least.

    Greedy, in the order given: put first what must be readable. Names may leave the frame only at a price.
    """
    taken: list[Box] = [*obstacles, *((x - 0.05, y - 0.05, x + 0.05, y + 0.05) for x, y in points)]
    corners: list[tuple[float, float]] = []
    for (x, y), text in zip(points, texts, strict=True):
        width = CHARACTER * len(text)
        right, left, middle = x + GAP, x - GAP - width, x - width / 2
        above, below, level = y + GAP, y - GAP - LINE, y - LINE / 2
        spots = [(right, level), (left, level), (right, above), (left, above), (right, below), (left, below),
                 (middle, above), (middle, below)]  # fmt: skip
        boxes = [(a, b, a + width, b + LINE) for a, b in spots]
        costs = [sum(_common(box, other) for other in taken) + 3 * _outside(box, frame) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        corners.append(spots[best])
    return corners


def _common(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def _outside(box: Box, frame: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1]) - _common(box, frame)
