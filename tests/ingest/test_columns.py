"""Which pages are put in another order, by where their text stands."""

from ingest.formats.pdf.columns import Box, column_order

LINE = 12.0


def box(left: float, row: float, width: float) -> Box:
    return Box(left, 700 - LINE * row, left + width, 709 - LINE * row)


def rows(n: int, *columns: tuple[float, float]) -> list[Box]:
    """n lines of boxes, (left, width) for each column, written line by line."""
    return [box(left, row, width - 7 * (row % 3)) for row in range(n) for left, width in columns]


def test_lines_across_two_columns_are_taken_apart():
    order = column_order(rows(10, (50, 220), (290, 220)))
    assert order == [[index] for index in [*range(0, 20, 2), *range(1, 20, 2)]]


def test_columns_that_follow_each_other_stay():
    left, right = rows(10, (50, 220)), rows(10, (290, 220))
    assert column_order([*left, *right]) is None


def test_one_column_stays():
    assert column_order(rows(30, (50, 460))) is None
    assert column_order([]) is None


def test_words_of_a_line_stay_together():
    boxes = [box(left, row, 60) for row in range(8) for left in (50, 113, 176, 270, 333, 396)]
    order = column_order(boxes)
    assert order is not None
    assert order[:2] == [[0, 1, 2], [6, 7, 8]]
    assert order[8] == [3, 4, 5]


def test_a_title_over_both_columns_parts_what_is_above_from_what_is_below():
    above = rows(8, (50, 220), (290, 220))
    below = [Box(one.left, one.bottom - 200, one.right, one.top - 200) for one in above]
    order = column_order([*above, box(50, 12, 460), *below])
    assert order is not None
    assert order[16] == [16]
    assert order[:9] == [[index] for index in [*range(0, 16, 2), 1]]
    assert order[17] == [17]
    assert order[25] == [18]


def test_tables_stay():
    numbers = [part for row in range(12) for part in (box(50, row, 200), box(400, row, 30))]
    far_apart = rows(12, (50, 120), (400, 120))
    uneven = [part for row in range(12) for part in (box(50, row, 40 + 20 * (row % 8)), box(290, row, 220))]
    assert column_order(numbers) is None
    assert column_order(far_apart) is None
    assert column_order(uneven) is None


def test_few_lines_side_by_side_stay():
    assert column_order(rows(5, (50, 220), (290, 220))) is None
