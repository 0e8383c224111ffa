"""The reading order of pages set in columns whose file goes through them line by line, across all columns.

Most files hold one column after the other, and their order is right as it stands. Some programs write what stands at
the same height together; read in that order, every line runs on into the next column. Geometry decides here, and
tables, which look much the same, are left alone: their cells do not fill their columns as lines of prose do.
"""

from collections.abc import Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple

_LEAST_PAIRS = 6
"""Rows with text on both sides of a gap, below which nothing is a column."""
_PAIR_SHARE = 0.4
_LEAST_FILL = 0.72
"""Mean length of a column's lines by its longest."""
_LEAST_SHARE = 0.2
"""Width of a column by that of the page's text."""
_MOST_WHITE = 0.25
"""White between two columns by the narrower one."""
_LEAST_LETTERS = 16
_MOST_DEPTH = 3
_LETTER = 0.5
"""Mean width of a letter by the height of its line."""


class Box(NamedTuple):
    """Where a run of text lies, in points, y upwards."""

    left: float
    bottom: float
    right: float
    top: float


def column_order(boxes: Sequence[Box]) -> list[list[int]] | None:
    """The page's lines in reading order, each as indices of its boxes from left to right; None when the order in which
    the boxes come is as good. `boxes` are in the order of the file."""
    lines = _lines(list(range(len(boxes))), boxes)
    ordered = list(_ordered(lines, boxes, _MOST_DEPTH))
    return None if ordered == lines else ordered


def _lines(indices: Sequence[int], boxes: Sequence[Box]) -> list[list[int]]:
    """Runs of boxes at the same height, each from left to right."""
    lines: list[list[int]] = []
    for index in indices:
        if lines and _same_height(boxes[lines[-1][-1]], boxes[index]):
            lines[-1].append(index)
        else:
            lines.append([index])
    return [sorted(line, key=lambda index: boxes[index].left) for line in lines]


def _same_height(one: Box, other: Box) -> bool:
    overlap = min(one.top, other.top) - max(one.bottom, other.bottom)
    return overlap > 0.4 * min(one.top - one.bottom, other.top - other.bottom)


def _ordered(lines: list[list[int]], boxes: Sequence[Box], depth: int) -> Iterator[list[int]]:
    """The same lines, those that run over columns taken apart."""
    gap = _gutter(lines, boxes) if depth else None
    if gap is None:
        yield from lines
        return
    left: list[list[int]] = []
    right: list[list[int]] = []
    for line in lines:
        if any(boxes[index].left < gap < boxes[index].right for index in line):
            yield from _both(left, right, boxes, depth)
            left, right = [], []
            yield line
        else:
            left += [part] if (part := [index for index in line if boxes[index].right <= gap]) else []
            right += [part] if (part := [index for index in line if boxes[index].left >= gap]) else []
    yield from _both(left, right, boxes, depth)


def _both(left: list[list[int]], right: list[list[int]], boxes: Sequence[Box], depth: int) -> Iterator[list[int]]:
    yield from _ordered(left, boxes, depth - 1)
    yield from _ordered(right, boxes, depth - 1)


def _gutter(lines: list[list[int]], boxes: Sequence[Box]) -> float | None:
    """An x between two columns of prose, or None."""
    if len(lines) < _LEAST_PAIRS:
        return None
    height = median(boxes[index].top - boxes[index].bottom for line in lines for index in line)
    gaps = [gap for line in lines for gap in _gaps(line, boxes, height)]
    if len(gaps) < _LEAST_PAIRS:
        return None
    at = _most_covered(gaps)
    pairs = [line for line in lines if any(start < at < end for start, end in _gaps(line, boxes, height))]
    if len(pairs) < max(_LEAST_PAIRS, _PAIR_SHARE * len(lines)):
        return None
    return at if _is_prose(pairs, boxes, at, height) else None


def _gaps(line: list[int], boxes: Sequence[Box], height: float) -> Iterator[tuple[float, float]]:
    """The white between a line's boxes, where it is wider than between words."""
    reach = boxes[line[0]].right
    for index in line[1:]:
        if boxes[index].left - reach > 0.8 * height:
            yield reach, boxes[index].left
        reach = max(reach, boxes[index].right)


def _most_covered(gaps: Sequence[tuple[float, float]]) -> float:
    """The middle of where most gaps lie over each other."""
    edges = sorted([(start, 1) for start, _ in gaps] + [(end, -1) for _, end in gaps])
    best, best_at, count = 0, 0.0, 0
    for place, (x, step) in enumerate(edges[:-1]):
        count += step
        if count > best:
            best, best_at = count, (x + edges[place + 1][0]) / 2
    return best_at


def _is_prose(pairs: list[list[int]], boxes: Sequence[Box], at: float, height: float) -> bool:
    """Whether both sides are lines that fill a column, close to each other, and not cells of a table."""
    left = [[boxes[index] for index in line if boxes[index].right <= at] for line in pairs]
    right = [[boxes[index] for index in line if boxes[index].left >= at] for line in pairs]
    page = max(box.right for line in right for box in line) - min(box.left for line in left for box in line)
    white = min(box.left for line in right for box in line) - max(box.right for line in left for box in line)
    widths = [[_width(line) for line in side] for side in (left, right)]
    return white <= _MOST_WHITE * min(map(max, widths)) and all(
        max(side) >= _LEAST_SHARE * page
        and fmean(side) >= _LEAST_FILL * max(side)
        and fmean(side) >= _LEAST_LETTERS * _LETTER * height
        for side in widths
    )


def _width(boxes: Sequence[Box]) -> float:
    return max(box.right for box in boxes) - min(box.left for box in boxes)
