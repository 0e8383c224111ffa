from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.scheduler.stops import StopStrings


def run(stops, pieces) -> tuple[list[str], bool]:
    machine, shown = StopStrings(stops), []
    for piece in pieces:
        text, stopped = machine.push(piece)
        shown.append(text)
        if stopped:
            return [*shown, machine.finish()], True
    return [*shown, machine.finish()], False


def test_a_stop_string_over_several_pieces_is_not_shown():
    assert run(["\nUser:"], ["Yes", ".\n", "Us", "er", ": more"]) == (["Yes", ".", "", "", "", ""], True)


def test_a_false_start_is_shown_late():
    assert run(["STOP"], ["ST", "EP", "ST"]) == (["", "STEP", "", "ST"], False)


def test_the_earliest_of_several_wins_and_nothing_follows():
    machine = StopStrings(["cd", "bc"])
    assert machine.push("abcd") == ("a", True)
    assert machine.push("xyz") == ("", True)
    assert machine.finish() == ""


def test_no_stops_hold_nothing_back():
    assert run(["", ""], ["a", "b"]) == (["a", "b", ""], False)


texts = st.text(alphabet="ab", max_size=12)


@settings(deadline=None)
@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.lists(texts, max_size=6))
def test_shown_text_is_the_text_before_the_first_stop(stops, pieces):
    whole = "".join(pieces)
    shown, stopped = run(stops, pieces)
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert stopped == bool(found)
    if not stopped:
        assert "".join(shown) == whole
    else:
        # A longer stop that begins earlier may be overtaken by one that is complete first.
        assert whole.startswith("".join(shown))
        assert not any(stop in "".join(shown) for stop in stops)
