"""Files that are sent to who goes away."""

import asyncio
import threading

import pytest

from service.api.ranges import ByteRange, _read


@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_was_being_opened_for_who_went_away_is_closed(is_there, tmp_path, monkeypatch):
    path, opened = tmp_path / "file", []
    may_open, was_tried = threading.Event(), threading.Event()
    path.write_bytes(b"text")
    real = type(path).open

    def slow(self, mode):
        may_open.wait(5)
        was_tried.set()
        if not is_there:
            raise FileNotFoundError(self)
        opened.append(real(self, mode))
        return opened[-1]

    monkeypatch.setattr(type(path), "open", slow)

    async def goes_away():
        reading = asyncio.ensure_future(anext(_read(path, ByteRange(0, 3))))
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        may_open.set()
        await asyncio.to_thread(was_tried.wait, 5)
        await asyncio.sleep(0.1)

    asyncio.run(goes_away())
    assert all(file.closed for file in opened)
    assert len(opened) == is_there
