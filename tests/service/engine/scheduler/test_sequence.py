from service.engine.scheduler.detokenizer import Detokenizer
from service.engine.scheduler.sequence import AnswerWriter
from service.engine.scheduler.stops import StopStrings


class Characters:
    """A decoder whose tokens are characters."""

    def decode(self, ids):
        return "".join(map(chr, ids))


def test_character_zero_is_shown_as_every_database_keeps_it():
    shown: list[str] = []
    writer = AnswerWriter(Detokenizer(Characters()), StopStrings(()), shown.append)
    for token in (ord("a"), 0, ord("b")):
        assert not writer.push(token)
    writer.finish()
    assert "".join(shown) == "a\ufffdb"
