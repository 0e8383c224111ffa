"""Machines, as measured or as assumed. Figures of the H200, and of the CPU with the demo model, are those of
docs/performance.md; `prompt_s` is what a question's pass takes beside a step, less what the model adds for its 40 rows
as if they were an answer's, so that it is below 0 where a pass of many rows is cheap. The 16 GB card was never
measured: its figures follow from what such cards are said to do."""

from dataclasses import dataclass

from benchmarks.capacity_parts.inputs import Worker
from cache_store.layout import KVLayout, KVType

GB, TB = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Machine:
    """`kv_nbytes`: of a token. `facts`: each figure, with where it is from."""

    name: str
    worker: Worker
    kv_nbytes: int
    facts: tuple[tuple[str, str, str], ...]


MEASURED = "measured, docs/performance.md"
ASSUMED = "**assumed**"

CPU = Machine(
    "two CPU cores, demo model, K8V4, BF16",
    Worker(
        places=4,
        step_s=0.0437,
        row_s=0.0086,
        memory_nbytes=2 * 2**30,
        disk_bps=56.2e6 / (0.383 - 0.184),
        disk_nbytes=100 * GB,
        prompt_s=0.184 - 0.0523 - 40 * 0.0086,
        prefill_s=1 / 389,
        hold_s=0.03,
    ),
    9_367,
    (
        ("step of 1 and of 4 answers", "52.3 and 78 ms (19.1 and 51.3 tok/s)", MEASURED),
        ("first token of a resident document", "184 ms", MEASURED),
        ("restore from the disk", "282 MB/s (383 ms less 184 for 56.2 MB)", MEASURED),
        ("prefill", "389 tok/s", MEASURED),
        ("memory for documents, disk", "2 GiB (the default), 100 GB", ASSUMED),
    ),
)

_8B = KVLayout(n_layers=32, n_kv_heads=8, head_dim=128, kv_type=KVType.K8V4)
CARD_16 = Machine(
    "one 16 GB card, 8B model of 4 bits, K8V4",
    Worker(
        places=8,
        step_s=0.0186,
        row_s=0.0004,
        memory_nbytes=9 * GB,
        disk_bps=1.9 * GB,
        disk_nbytes=1 * TB,
        context_s=_8B.bytes_per_token / (448 * GB * 0.4),
        prompt_s=0.03 - 40 * 0.0004,
        prompt_context_s=6.6e-7,
        prefill_s=1 / 2_400,
        prefill_pair_s=2.3e-9,
        host_nbytes=32 * GB,
        host_bps=12 * GB,
        restore_s=0.012,
        thread_share=0.02,
        compute_share=0.55,
        hold_s=0.03,
    ),
    _8B.bytes_per_token,
    (
        ("step", "18.6 ms: 5 GB of weights at 60 % of 448 GB/s; KV at 40 % of it", ASSUMED),
        ("prefill", "2,400 tok/s: half of 76 TFLOP/s", ASSUMED),
        ("memory for documents", "9 GB of 16", ASSUMED),
        ("restore from the disk", "1.9 GB/s, as on the H200's machine", ASSUMED),
        ("restore from host memory", "12 GB/s (PCIe 4.0 with 8 lanes), 32 GB", ASSUMED),
        ("disk", "1 TB", ASSUMED),
    ),
)

H200 = Machine(
    "one H200, 27B model of 4 bits, K8V4",
    Worker(
        places=8,
        step_s=0.0128,
        row_s=0.00027,
        memory_nbytes=125.6 * GB,
        disk_bps=1.9 * GB,
        disk_nbytes=4 * TB,
        context_s=4.5e-8,
        prompt_s=0.028 - 40 * 0.00027,
        prompt_context_s=6.6e-7,
        prefill_s=9.53e-5,
        prefill_pair_s=9.67e-10,
        host_nbytes=256 * GB,
        host_bps=54.9 * GB,
        restore_s=0.012,
        thread_share=0.02,
        compute_share=0.55,
        hold_s=0.03,
    ),
    106_500,
    (
        ("step of 8 answers behind 8K, through host and scheduler", "15.3 ms (523 tok/s)", MEASURED),
        ("each answer more in a step; each token of a document more", "0.27 ms; 45 ns", MEASURED),
        ("pass of a question of 30 tokens", "30 ms, and 87 more behind 128K", MEASURED),
        ("prefill of 8K and of 128K", "9,692 and 4,506 tok/s", MEASURED),
        ("prefill beside answers", "53 to 57 % as fast as alone", MEASURED),
        ("memory for documents", "1,179,648 tokens: 125.6 GB", MEASURED),
        ("restore from host memory, from the disk", "54.9 and 1.9 GB/s", MEASURED),
        ("a snapshot", "106.5 kB a token (13.97 GB of 131,072)", MEASURED),
        ("host memory for documents, disk", "256 GB, 4 TB for each card", ASSUMED),
    ),
)
