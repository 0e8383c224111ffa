"""The cards that CUDA shows to a process, and in which order: not always all that the driver has, nor in its order."""

import os
from collections.abc import Mapping, Sequence

from service.errors import Invalid
from service.planning.cards import recognized
from service.planning.nvidia import CardState, read_cards

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


def visible_cards() -> list[CardState]:
    """Of this machine, to processes with this one's environment. Raises Invalid as `visible` does."""
    return visible(read_cards(), os.environ)


def visible(cards: Sequence[CardState], environment: Mapping[str, str]) -> list[CardState]:
    """Those of a driver's cards that CUDA shows, in its order: the first is the one that the engine runs on.

    As CUDA's programming guide has it: numbers count in CUDA's own order, a card's UUID may be cut as long as it is
    that of one card, what follows an entry that names no card is not read, and a card that is named twice hides all.
    Raises Invalid for a part of a card (MIG), of which the driver does not say here how large it is.
    """
    ordered = _in_cudas_order(cards, environment.get(ORDER, ""))
    if (value := environment.get(VISIBLE)) is None:
        return ordered
    shown: list[CardState] = []
    for entry in value.split(","):
        if (card := _named(entry.strip(), ordered)) is None:
            break
        if card in shown:
            return []
        shown.append(card)
    return shown


def _in_cudas_order(cards: Sequence[CardState], order: str) -> list[CardState]:
    """The driver's order is that of the PCI bus; CUDA's own begins with the fastest card, where nothing else is said.
    How it tells which that is, is not documented: here by products a second, or else by generation."""
    by_bus = sorted(cards, key=lambda card: card.index)
    if order == "PCI_BUS_ID":
        return by_bus
    known = [recognized(card.name, card.total_nbytes) for card in by_bus]
    if all(known):
        speeds = {card.index: found.fp16_tflops for card, found in zip(by_bus, known, strict=True) if found}
        return sorted(by_bus, key=lambda card: -speeds[card.index])
    return sorted(by_bus, key=lambda card: card.capability or (0, 0), reverse=True)


def _named(entry: str, ordered: Sequence[CardState]) -> CardState | None:
    if entry.startswith("MIG-"):
        raise Invalid(
            f"{VISIBLE} names a part of a card ({entry}), whose size is not known here: give the card with --card and "
            "the part's memory with --memory-gb.",
            param="card",
        )
    if entry.startswith("GPU-"):
        found = [card for card in ordered if card.uuid.startswith(entry)]
        return found[0] if len(found) == 1 else None
    number = int(entry) if entry.isascii() and entry.isdigit() else -1
    return ordered[number] if 0 <= number < len(ordered) else None
