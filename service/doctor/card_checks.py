"""Checks of NVIDIA cards: where the model runs, and what slows it down there."""

from collections.abc import Iterator

from service.doctor.context import Context
from service.doctor.findings import Finding, together
from service.engine.llama_engine.library import FOR_THE_CARD, INSTALL
from service.planning.visible import VISIBLE

_HOT_C = 87
_OTHERS_NBYTES = 64 << 20
_NARROW = 8
_NO_CARDS = "there is no NVIDIA card, or CUDA_VISIBLE_DEVICES hides it"


def off_card(context: Context) -> Finding:
    """Whether the model runs on the processor although there is a card."""
    say, all_cards, cards = context.finding("off-card"), context.probes.cards(), context.cards()
    if context.on_card and not all_cards:
        return say.fail(
            "PREREAD_ENGINE=exl2, and no NVIDIA driver answers",
            "install the driver (`nvidia-smi` has to list the card), in a container pass the card in (--gpus all), or "
            "set PREREAD_ENGINE=torch",
        )
    if not all_cards:
        return say.skip(_NO_CARDS)
    if not cards:
        return say.fail(
            f"{VISIBLE}={context.probes.environment().get(VISIBLE)!r} hides all {len(all_cards)} cards",
            f"unset it, or name a card: {VISIBLE}=0",
        )
    if context.settings.engine == "llamacpp":
        return _llama_off_card(context, cards[0].name)
    if not context.on_card and context.settings.engine != "fake":
        return say.fail(
            f"PREREAD_ENGINE={context.settings.engine}: every layer runs on the processor, beside {cards[0].name}",
            "set PREREAD_ENGINE=exl2 (docs/gpu.md); the engine puts all layers on the card or does not start",
        )
    return say.ok(f"all layers on {cards[0].name}")


def _llama_off_card(context: Context, card: str) -> Finding:
    say, backends = context.finding("off-card"), context.probes.llama_backends()
    if backends is None:
        return say.fail("PREREAD_ENGINE=llamacpp, and llama-cpp-python is not installed", INSTALL)
    if not backends:
        return say.fail(f"llama.cpp was compiled for the processor alone, beside {card}", FOR_THE_CARD)
    if context.settings.offload == "none":
        return say.fail(
            f"PREREAD_OFFLOAD=none: every layer runs on the processor, beside {card}", "set PREREAD_OFFLOAD=all"
        )
    return say.ok(f"llama.cpp was compiled for {', '.join(backends)}: all layers on {card}, or no start")


def other_processes(context: Context) -> Finding:
    """Whether others compute on the card."""
    say, cards = context.finding("other-processes"), context.cards()
    if not cards:
        return say.skip(_NO_CARDS)
    others = [p for p in cards[0].processes if p.nbytes >= _OTHERS_NBYTES and not p.is_engine]
    if not others:
        return say.ok(f"nobody else on {cards[0].name}; {cards[0].used_nbytes / 2**30:.2f} GiB in use")
    seen = ", ".join(f"{p.name or 'a process'} (pid {p.pid}) with {p.nbytes / 2**30:.2f} GiB" for p in others)
    return say.warn(
        f"on {cards[0].name}: {seen}",
        "end it, or give Preread another card (CUDA_VISIBLE_DEVICES): they share memory, bandwidth and clock. It is "
        "yours if it is an engine of Preread that already runs",
    )


def throttling(context: Context) -> Finding:
    """Whether heat or power hold the clock down."""
    say, cards = context.finding("throttling"), context.cards()
    if not cards:
        return say.skip(_NO_CARDS)
    state = cards[0]
    seen = f"{state.name} at {state.temperature_c} C, {state.sm_mhz} of {state.max_sm_mhz} MHz"
    if any("power cap" not in reason for reason in state.throttles):
        return say.fail(
            f"{seen}: {', '.join(state.throttles)}",
            "let air through the card (passive cards need a fan's air), clean it, check its power cables; "
            "`nvidia-smi -q -d PERFORMANCE` says more",
        )
    if state.throttles or state.temperature_c >= _HOT_C:
        return say.warn(
            f"{seen}{': ' + ', '.join(state.throttles) if state.throttles else ''}",
            "raise the limit (`nvidia-smi -pl WATTS`) or cool the card better, if it matters: memory bounds decode",
        )
    return say.ok(seen)


def pcie(context: Context) -> Finding:
    """Whether the card hangs on fewer lanes than it has: documents come back from host memory over them."""
    say, cards = context.finding("pcie"), context.cards()
    if not cards:
        return say.skip(_NO_CARDS)
    state = cards[0]
    if not state.pcie_width:
        return say.skip(f"the driver does not say the link of {state.name}")
    seen = f"{state.name} has {state.pcie_width} of {state.pcie_max_width} PCIe lanes, generation {state.pcie_max_gen}"
    if state.pcie_width < state.pcie_max_width or state.pcie_max_width < _NARROW:
        return say.warn(
            seen,
            "use the slot next to the processor, without a riser, and look into the board's manual which slots share "
            "lanes: restoring from host memory is slower by this share",
        )
    return say.ok(seen)


def first_call(context: Context) -> Finding:
    """What makes a first call slow, so that timing it says nothing."""
    if slowing := list(_slow_first_calls(context)):
        return together(slowing)
    return context.finding("first-call").ok("no driver has to be loaded and no clock has to rise before the first call")


def _slow_first_calls(context: Context) -> Iterator[Finding]:
    say, cards = context.finding("first-call"), context.cards()
    if cards and cards[0].persistence is False:
        yield say.warn(
            f"persistence mode of {cards[0].name} is off: its driver is unloaded when nobody uses the card",
            "`nvidia-smi -pm 1` as root; and never time a first call: it pays for the driver, for clocks that rise and "
            "for kernels that are loaded",
        )
    if slow := context.probes.governors() & {"powersave", "conservative"}:
        yield say.warn(
            f"the processor's clock is chosen by {', '.join(sorted(slow))}: it rises after the first call, or never",
            "`cpupower frequency-set -g performance` (or schedutil) as root, and time the second call",
        )
