"""Cards by name: memory, bandwidth, generation, what they multiply with and what carries data to them.

Memory is what the driver reports, in MiB; bandwidth is the makers' figure, in GB/s (10^9 bytes); `fp16_tflops` is of
dense products of FP16 summed in FP32, as prefill does them; `host_gbps` is what page-locked memory reaches over the
card's PCIe, not the makers' figure: cards of eight lanes stand one generation lower than they are.
"""

import re
from dataclasses import dataclass, replace

MIB = 1 << 20
CONTEXT_NBYTES = 512 * MIB
"""What CUDA's context takes of a card when a process makes one."""
FIRST_EXL2 = (7, 0)
FIRST_TRITON = (8, 0)
FIRST_BF16 = (8, 0)
FIRST_FP8 = (8, 9)
_RUN = {(9, 0)}
_COMPILED = {(7, 0), (7, 5), (8, 0), (8, 6), (8, 9)}
_PCIE_GBPS = {3: 12.0, 4: 24.0, 5: 50.0}


@dataclass(frozen=True, slots=True)
class Card:
    """A card or a processor. `capability` None: a processor, whose memory is the machine's.

    `free_nbytes` is what was seen to be free; of a card that is only named, all of it.
    """

    key: str
    name: str
    memory_nbytes: int
    bandwidth_gbps: float
    capability: tuple[int, int] | None
    fp16_tflops: float
    host_gbps: float
    free_nbytes: int

    @property
    def is_cpu(self) -> bool:
        return self.capability is None

    @property
    def architecture(self) -> str:
        """Such as "sm_70"."""
        return "cpu" if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def dtypes(self) -> dict[str, bool]:
        """Which number formats it computes with, by its generation."""
        major, minor = self.capability or (0, 0)
        return {
            "fp32": True,
            "fp16": self.is_cpu or major >= 6,
            "bf16": self.is_cpu or (major, minor) >= FIRST_BF16,
            "fp8": (major, minor) >= FIRST_FP8,
        }


_ROWS = """
v100-16     Tesla V100 16GB          16160   900   7.0  112   3
v100-32     Tesla V100 32GB          32501   900   7.0  112   3
t4          Tesla T4                 15109   320   7.5   65   3
p40         Tesla P40                22919   346   6.1   12   3
rtx-3060    GeForce RTX 3060         12288   360   8.6   25   4
rtx-3060-ti GeForce RTX 3060 Ti       8192   448   8.6   32   4
rtx-3070    GeForce RTX 3070          8192   448   8.6   41   4
rtx-3070-ti GeForce RTX 3070 Ti       8192   608   8.6   43   4
rtx-3080    GeForce RTX 3080         10240   760   8.6   60   4
rtx-3080-12 GeForce RTX 3080         12288   912   8.6   61   4
rtx-3080-ti GeForce RTX 3080 Ti      12288   912   8.6   68   4
rtx-3090    GeForce RTX 3090         24576   936   8.6   71   4
rtx-3090-ti GeForce RTX 3090 Ti      24564  1008   8.6   80   4
rtx-4060    GeForce RTX 4060          8188   272   8.9   30   3
rtx-4060-ti GeForce RTX 4060 Ti      16380   288   8.9   44   3
rtx-4070    GeForce RTX 4070         12282   504   8.9   58   4
rtx-4070-super    GeForce RTX 4070 SUPER     12282   504   8.9   71   4
rtx-4070-ti GeForce RTX 4070 Ti      12282   504   8.9   80   4
rtx-4070-ti-super GeForce RTX 4070 Ti SUPER  16376   672   8.9   88   4
rtx-4080    GeForce RTX 4080         16376   717   8.9   97   4
rtx-4080-super    GeForce RTX 4080 SUPER     16376   736   8.9  104   4
rtx-4090    GeForce RTX 4090         24564  1008   8.9  165   4
rtx-5060    GeForce RTX 5060          8151   448  12.0   38   4
rtx-5060-ti GeForce RTX 5060 Ti      16311   448  12.0   47   4
rtx-5070    GeForce RTX 5070         12227   672  12.0   62   5
rtx-5070-ti GeForce RTX 5070 Ti      16303   896  12.0   88   5
rtx-5080    GeForce RTX 5080         16303   960  12.0  113   5
rtx-5090    GeForce RTX 5090         32607  1792  12.0  210   5
a10         A10                      23028   600   8.6  125   4
l4          L4                       23034   300   8.9  121   4
a100-40     A100 40GB                40960  1555   8.0  312   4
a100-80     A100 80GB                81920  1935   8.0  312   4
h100        H100                     81559  3350   9.0  989   5
h100-pcie   H100 PCIe                81559  2039   9.0  756   5
h100-nvl    H100 NVL                 95830  3938   9.0  835   5
h200        H200                    143771  4800   9.0  989   5
"""


def _parsed(row: str) -> Card:
    key, *name, memory, bandwidth, capability, tflops, pcie = row.split()
    major, minor = capability.split(".")
    nbytes = int(memory) * MIB
    sm = int(major), int(minor)
    return Card(key, " ".join(name), nbytes, float(bandwidth), sm, float(tflops), _PCIE_GBPS[int(pcie)], nbytes)


def tried(capability: tuple[int, int]) -> str:
    """How far the exl2 engine is known on a generation: "run", "compiled", "reasoned" only, or "refused". docs/cards.md
    says it part by part."""
    if capability < FIRST_EXL2:
        return "refused"
    return "run" if capability in _RUN else "compiled" if capability in _COMPILED else "reasoned"


_SLOWER = {"laptop", "max", "mobile"}
CARDS = {card.key: card for card in map(_parsed, _ROWS.strip().splitlines())}


def named(key: str) -> Card | None:
    """The card of a key, however it is written ("V100-16", "rtx 3090"); None when there is none."""
    wanted = re.sub(r"[^a-z0-9]", "", key.lower())
    return next((c for k, c in CARDS.items() if k.replace("-", "") in (wanted, f"rtx{wanted}")), None)


def recognized(name: str, memory_nbytes: int) -> Card | None:
    """The card that a driver calls so: the one with most of its words in the name, of these the nearest in memory. None
    for those of laptops, which are other cards of the same names."""
    words = set(re.findall(r"[a-z]+\d*|\d+", name.lower().replace("-", " ")))
    fitting = [card for card in CARDS.values() if _words(card) <= words and not words & _SLOWER]
    if not fitting:
        return None
    most = max(len(_words(card)) for card in fitting)
    best = [card for card in fitting if len(_words(card)) == most]
    return min(best, key=lambda card: abs(card.memory_nbytes - memory_nbytes))


def _words(card: Card) -> set[str]:
    """What has to be in a driver's name for this card: neither its memory nor its family."""
    return {word for word in card.name.lower().split() if not word.endswith("gb") and word not in ("tesla", "geforce")}


def processor(memory_nbytes: int, free_nbytes: int, bandwidth_gbps: float, fp32_tflops: float) -> Card:
    """A machine without a card."""
    free = min(free_nbytes, memory_nbytes)
    return Card("cpu", "processor", memory_nbytes, bandwidth_gbps, None, fp32_tflops, bandwidth_gbps, free)


def with_memory(card: Card, memory_nbytes: int, free_nbytes: int) -> Card:
    """The same card with what its driver says of its memory."""
    return replace(card, memory_nbytes=memory_nbytes, free_nbytes=free_nbytes)
