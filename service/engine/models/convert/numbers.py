"""Made-up tables, records and logs, the same every time: what documents have beside sentences."""

import json
import random
from collections.abc import Callable

_NAMES = (
    "Ada Lindqvist", "Bao Nguyen", "Carla Rossi", "Dmitri Volkov", "Emeka Obi", "Fatima Zahra", "Georg Huber",
    "Hana Sato", "Ivan Petrov", "José Álvarez", "Kim Min-jun", "Léa Martin", "Mei Chen", "Nora Haddad",
)  # fmt: skip
_THINGS = (
    "bolt M8x40", "filter F7", "pump seal", "cable 3x1.5 mm2", "sensor PT100", "valve DN25", "bearing 6204",
    "relay 24 V", "fuse 16 A", "gasket set", "hose 12 mm", "bracket L50", "motor 0.75 kW", "switch IP67",
)  # fmt: skip
_EVENTS = ("request served", "retrying", "cache miss", "connection reset by peer", "checkpoint written")
_PLACES = ("Porto", "Graz", "Lagos", "Osaka", "Lima", "Turku", "Izmir", "Pune", "Quito", "Leeds", "Brno", "Busan")
_PARTS = ("store", "parser", "queue", "gateway", "index", "mailer")


def made_up_texts(n: int = 48) -> list[str]:
    """`n` texts of about 2,000 characters, kind after kind."""
    draw = random.Random(1846)  # noqa: S311 - reproducible, not secret
    kinds: list[Callable[[random.Random], str]] = [_invoice, _csv, _json, _log, _measurements, _minutes]
    return [kinds[i % len(kinds)](draw) for i in range(n)]


def _date(draw: random.Random) -> str:
    day, month, year = draw.randint(1, 28), draw.randint(1, 12), draw.randint(1987, 2031)
    return draw.choice((f"{year}-{month:02}-{day:02}", f"{day}.{month}.{year}", f"{month}/{day}/{year}"))


def _invoice(draw: random.Random) -> str:
    lines = [f"INVOICE No. {draw.randint(10000, 99999)}/{draw.randint(20, 31)}", f"Date: {_date(draw)}"]
    lines += [f"Customer: {draw.choice(_NAMES)}, {draw.choice(_PLACES)}", "", "Pos  Item  Qty  Unit price  Total"]
    total = 0.0
    for position in range(1, draw.randint(18, 26)):
        count, price = draw.randint(1, 60), draw.randint(35, 48000) / 100
        total += count * price
        lines.append(f"{position}  {draw.choice(_THINGS)}  {count}  {price:,.2f}  {count * price:,.2f}")
    tax = round(0.19 * total, 2)
    lines += [
        "",
        f"Net: {total:,.2f} EUR",
        f"VAT 19 %: {tax:,.2f} EUR",
        f"To pay by {_date(draw)}: {total + tax:,.2f} EUR",
    ]
    return "\n".join(lines)


def _csv(draw: random.Random) -> str:
    rows = ["id;name;place;since;balance;share"]
    for _ in range(40):
        rows.append(
            f"{draw.getrandbits(32):08x};{draw.choice(_NAMES)};{draw.choice(_PLACES)};{_date(draw)};"
            f"{draw.uniform(-9999, 99999):.2f};{draw.random():.4f}"
        )
    return "\n".join(rows)


def _json(draw: random.Random) -> str:
    orders = [
        {
            "order": draw.randint(100000, 999999), "customer": draw.choice(_NAMES), "paid": draw.random() < 0.7,
            "ships_to": {"city": draw.choice(_PLACES), "code": f"{draw.randint(1000, 99999)}"},
            "items": [{"sku": draw.choice(_THINGS), "n": draw.randint(1, 9)} for _ in range(draw.randint(1, 3))],
        }
        for _ in range(7)
    ]  # fmt: skip
    return json.dumps({"orders": orders, "next": None}, indent=2, ensure_ascii=False)


def _log(draw: random.Random) -> str:
    lines, second = [], draw.randint(0, 80000)
    for _ in range(28):
        second += draw.randint(0, 90)
        clock = f"{second // 3600 % 24:02}:{second // 60 % 60:02}:{second % 60:02}.{draw.randint(0, 999):03}"
        level = draw.choices(("INFO", "WARNING", "ERROR"), (8, 2, 1))[0]
        lines.append(
            f"{clock} {level:<7} {draw.choice(_PARTS)}[{draw.randint(100, 9999)}]: {draw.choice(_EVENTS)} "
            f"id={draw.getrandbits(40):010x} ms={draw.expovariate(0.02):.1f} bytes={draw.randint(0, 1 << 20)}"
        )
    return "\n".join(lines)


def _measurements(draw: random.Random) -> str:
    lines = [f"Station {draw.choice(_PLACES)}, readings of {_date(draw)}", ""]
    lines += ["| time | °C | hPa | % rh | m/s |", "|---|---|---|---|---|"]
    for hour in range(24):
        lines.append(
            f"| {hour:02}:00 | {draw.gauss(14, 6):.1f} | {draw.gauss(1013, 7):.1f} | {draw.randint(28, 99)} | "
            f"{abs(draw.gauss(3, 2)):.1f} |"
        )
    lines += ["", f"Mean of the day: {draw.gauss(14, 4):.2f} °C; rain: {draw.expovariate(0.3):.1f} mm."]
    return "\n".join(lines)


def _minutes(draw: random.Random) -> str:
    lines = [f"Minutes of the meeting of {_date(draw)} in {draw.choice(_PLACES)}", ""]
    for point in range(1, 13):
        who, other = draw.sample(_NAMES, 2)
        lines.append(
            f"{point}. {who} reports that {draw.randint(2, 97)} of {draw.randint(98, 400)} {draw.choice(_THINGS)} were "
            f"returned before {_date(draw)}; {other} answers within {draw.randint(2, 30)} days (ref. "
            f"{draw.choice('ABCDEF')}-{draw.randint(100, 999)}, {draw.randint(1, 90)},{draw.randint(100, 999)} euros)."
        )
    return "\n".join(lines)
