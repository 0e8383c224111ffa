"""Whether zstd would pay in a tier: how far the KV of a real document can be compressed, how fast, and what that saves.

    .venv/bin/pip install --group bench
    python -m benchmarks.compression [--tokens 1536] [--repeats 5] [--write]
    python -m benchmarks.compression --snapshot STORE/snapshots/OWNER/documents/ID/FINGERPRINT

The example contract is read with the demo model in each quantized KV type, and its records are compressed as they lie
in a shard, all in one frame, which is the best case for zstd. Three orders of the bytes: `as stored`; `bytes`, where
codes and scales stand apart, the codes of one channel together, and the two bytes of a scale apart; `planes`, where
beside that the bits of one weight stand together. What ordering takes counts (it is done by numpy; as C code is faster,
the table says too what would be saved if it took no time).

*bound* is what a coder reaches that knows how often each byte is among all of them, and nothing else; one that adapts
to a channel can do a little better. What a tier of a speed gains is taken at best: bytes are decompressed while others
still arrive, on one core. Times are those of the processor. `--write` puts the table into docs/tiers.md.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks.bench_report import Timing, machine, print_json, table, write_section
from cache_store.codec import decode_records, encode_record
from cache_store.keys import EntryName, SnapshotKey
from cache_store.layout import KVLayout, KVType, packed_nbytes
from cache_store.reader import SnapshotReader
from service.cli.config import read_settings
from service.engine.models.source import quiet_transformers
from service.engine.tokenizer import Tokenizer
from service.engine.torch_engine.loading import load_model
from service.engine.torch_engine.runner import CHUNK_TOKENS, TorchRunner

ROOT = Path(__file__).parents[1]
TEXT = ROOT / "examples" / "contract" / "contract.md"
PAGE = ROOT / "docs" / "tiers.md"
TYPES = (KVType.K8V8, KVType.K8V4, KVType.K4V4)
LEVELS = (1, 3)
SPEEDS = (0.1, 1.0, 5.0)
"""Of tiers, in GB/s."""
GB = 1e9
Bytes = npt.NDArray[np.uint8]
Order = Callable[[Bytes], Bytes]


@dataclass(frozen=True, slots=True)
class Figure:
    """`ratio`: stored bytes by compressed ones. Speeds are in stored bytes a second; `unpack_free`: without what
    ordering takes."""

    kv_type: str
    order: str
    level: int
    nbytes: int
    ratio: float
    bound: float
    pack: Timing
    unpack: Timing
    unpack_free: Timing

    def gain(self, speed: float, *, ordered: bool = True) -> float:
        """The share of the time to bring a snapshot that is saved in a tier of so many GB/s; negative when lost."""
        seconds = (self.unpack if ordered else self.unpack_free).median
        plain = self.nbytes / (speed * GB)
        return 1 - max(plain / self.ratio, seconds) / plain


def records(model_dir: Path, kv_type: KVType, ids: list[int]) -> tuple[KVLayout, list[Bytes]]:
    """The document's records in whole blocks, layer by layer as in a shard."""
    with quiet_transformers():
        loaded = load_model(model_dir, "float32", "cpu")
    runner = TorchRunner(loaded, kv_type, n_slots=1, tail_tokens=16, chunk_tokens=CHUNK_TOKENS)
    document, blocks = runner.new_document(len(ids)), []
    with torch.inference_mode():
        for first in range(0, len(ids), CHUNK_TOKENS):
            blocks += runner.prefill_chunk(document, ids[first : first + CHUNK_TOKENS])
    layers = range(runner.layout.n_layers)
    return runner.layout, [np.frombuffer(block[layer], np.uint8).copy() for layer in layers for block in blocks]


def records_of(snapshot: Path, kv_type: KVType) -> tuple[KVLayout, list[Bytes]]:
    """As `records`, from the whole blocks of an FP16 snapshot that lies in a directory of a store."""
    *_, owner, _, document, fingerprint = snapshot.parts
    name = EntryName(SnapshotKey(owner, "document", document), fingerprint)
    with SnapshotReader(snapshot.parents[3], name) as reader:
        stored = reader.layout
        blocks = reader.read_blocks(range(reader.n_tokens // stored.block_tokens))
    layout, found = replace(stored, kv_type=kv_type), []
    k, v = (torch.empty(stored.n_kv_heads, stored.block_tokens, stored.head_dim) for _ in range(2))
    for layer in range(stored.n_layers):
        for block in blocks:
            decode_records(block[layer], stored.block_tokens, stored, out_k=k, out_v=v)
            found.append(np.frombuffer(encode_record(k, v, layout), np.uint8))
    return layout, found


class Orders:
    """The three orders of the bytes of whole records of a layout, and their inverses."""

    def __init__(self, layout: KVLayout) -> None:
        rows = layout.n_kv_heads * layout.block_tokens
        widths = [
            width
            for bits in (layout.kv_type.key_bits, layout.kv_type.value_bits)
            for width in packed_nbytes(bits, layout.head_dim)
        ]
        self._shapes = [(rows, width) for width in widths]
        self._nbytes = sum(rows * width for width in widths)

    def apart(self, data: Bytes) -> Bytes:
        """Each part of all records together; within it each byte of a row (a channel, a half of a scale) together."""
        return self._rearranged(data, lambda part: part.T)

    def together(self, data: Bytes) -> Bytes:
        """The inverse of `apart`."""
        n = len(data) // self._nbytes
        out, at, column = np.empty((n, self._nbytes), np.uint8), 0, 0
        for rows, width in self._shapes:
            part = data[at : at + n * rows * width].reshape(width, n * rows).T
            out[:, column : column + rows * width] = part.reshape(n, rows * width)
            at, column = at + n * rows * width, column + rows * width
        return out.reshape(-1)

    def planes(self, data: Bytes) -> Bytes:
        """As `apart`, and then the bits of one weight together."""
        return np.packbits(np.unpackbits(self.apart(data)).reshape(-1, 8).T)

    def unplanes(self, data: Bytes) -> Bytes:
        """The inverse of `planes`."""
        return self.together(np.packbits(np.unpackbits(data).reshape(8, -1).T))

    def _rearranged(self, data: Bytes, turn: Callable[[Bytes], Bytes]) -> Bytes:
        found, column, whole = [], 0, data.reshape(-1, self._nbytes)
        for rows, width in self._shapes:
            part = whole[:, column : column + rows * width].reshape(-1, width)
            found.append(np.ascontiguousarray(turn(part)).reshape(-1))
            column += rows * width
        return np.concatenate(found)


def entropy(data: Bytes) -> float:
    """Of single bytes, in bits."""
    share = np.bincount(data, minlength=256) / len(data)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def timed(work: Callable[[], object], repeats: int) -> Timing:
    """Seconds of the processor, which other work on the machine does not change."""
    samples = []
    for _ in range(repeats):
        began = time.process_time()
        work()
        samples.append(time.process_time() - began)
    return Timing(tuple(samples))


def measured(layout: KVLayout, data: Bytes, repeats: int) -> list[Figure]:
    orders = Orders(layout)
    kinds: dict[str, tuple[Order, Order]] = {
        "as stored": (lambda x: x, lambda x: x),
        "bytes": (orders.apart, orders.together),
        "planes": (orders.planes, orders.unplanes),
    }
    figures = []
    for name, (to, back) in kinds.items():
        ordered = to(data)
        assert np.array_equal(back(ordered), data), name
        for level in LEVELS:
            packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
            packed = packer.compress(ordered.data)

            def unpack(unpacker=unpacker, packed=packed) -> Bytes:
                return np.frombuffer(unpacker.decompress(packed), np.uint8)

            assert np.array_equal(back(unpack()), data)
            figures.append(
                Figure(
                    str(layout.kv_type), name, level, len(data), len(data) / len(packed), 8 / entropy(ordered),
                    pack=timed(lambda to=to, packer=packer: packer.compress(to(data).data), repeats),
                    unpack=timed(lambda back=back, unpack=unpack: back(unpack()), repeats),
                    unpack_free=timed(unpack, repeats),
                )
            )  # fmt: skip
    return figures


def _speed(nbytes: int, timing: Timing) -> str:
    least, most = (nbytes / seconds / 1e6 for seconds in (max(timing.samples), min(timing.samples)))
    return f"{nbytes / timing.median / 1e6:.0f} ({least:.0f}-{most:.0f})"


def _gain(figure: Figure, speed: float) -> str:
    return f"{100 * figure.gain(speed):+.1f} ({100 * figure.gain(speed, ordered=False):+.1f})"


def report(figures: list[Figure], n_tokens: int, repeats: int) -> str:
    header = ["KV type", "order", "level", "ratio", "bound", "compress MB/s", "decompress MB/s"]
    header += [f"saved at {speed:g} GB/s, %" for speed in SPEEDS]
    rows = [
        [
            figure.kv_type, figure.order, figure.level, f"{figure.ratio:.3f}", f"{figure.bound:.3f}",
            _speed(figure.nbytes, figure.pack), _speed(figure.nbytes, figure.unpack),
            *(_gain(figure, speed) for speed in SPEEDS),
        ]
        for figure in figures
    ]  # fmt: skip
    sizes = statistics.mean({figure.nbytes for figure in figures}) / 1e6
    return (
        f"{machine()}; one core. {n_tokens} tokens, {sizes:.1f} MB in the mean. Medians of "
        f"{repeats} (least to most); in brackets what is saved if ordering took no time.\n\n{table(header, rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=read_settings().model_dir)
    parser.add_argument("--tokens", type=int, default=1536, help="rounded down to whole chunks")
    parser.add_argument("--snapshot", type=Path, help="directory of a stored FP16 snapshot, to read no document")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the table into docs/tiers.md")
    arguments = parser.parse_args()
    n_tokens = arguments.tokens // CHUNK_TOKENS * CHUNK_TOKENS
    ids: list[int] = []
    if arguments.snapshot is None:
        ids = Tokenizer.load(arguments.model).encode_plain(TEXT.read_text(encoding="utf-8"))[:n_tokens]
    figures: list[Figure] = []
    for kv_type in TYPES:
        if arguments.snapshot is not None:
            layout, found = records_of(arguments.snapshot, kv_type)
            n_tokens = len(found) // layout.n_layers * layout.block_tokens
        else:
            layout, found = records(arguments.model, kv_type, ids)
        figures += measured(layout, np.concatenate(found), arguments.repeats)
    text = report(figures, n_tokens, arguments.repeats)
    print(text)
    if arguments.write:
        write_section("compression", text, PAGE)
    best = {f"{speed:g}": max(figure.gain(speed) for figure in figures) for speed in SPEEDS}
    free = {f"{speed:g}": max(figure.gain(speed, ordered=False) for figure in figures) for speed in SPEEDS}
    print_json(best_saved=best, best_saved_if_ordering_were_free=free)


if __name__ == "__main__":
    main()
