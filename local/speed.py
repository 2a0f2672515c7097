"""``make figures``: what ``make bench`` measured, as the tables and the chart of the documents.

``make bench`` writes ``var/bench/NAME.json`` for each benchmark. ``make figures`` takes from them what the documents
show into ``docs/speed.json``, which is kept with the code; ``docs/speed.md``, ``docs/speed.svg`` and
``docs/a-million-queues.md`` are written from that.
"""

import json
import math
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

PROJECT = Path(__file__).resolve().parent.parent
DOCS = PROJECT / "docs"
MEASURED = PROJECT / "var" / "bench"
KEPT = DOCS / "speed.json"

TITLES = {
    "steady_pass": "A pass beside the list that it makes",
    "growth": "What a pass costs, from 1,000 to 50,000 queues",
    "memory": "Memory",
    "prometheus": "Lengths from the nodes' Prometheus endpoints",
    "warned": "From a message too many to the mail about it",
    "deleting": "500 deletions in one pass",
    "queue_list": "The list of queues, and its refresh",
    "registrations": "Registrations of agents",
    "cascade": "Deleting a subscription",
    "orphan_sweep": "The sweep of orphans",
    "publishing": "Publishing an event",
}
"""The benchmarks that are shown, in this order. Those of the toolkit and the message store have their own documents."""

SHOWN = ("where", "what", "unit", "median", "lowest", "highest", "floor", "ratio", "target", "met")

Figure = Mapping[str, Any]


def gather() -> dict[str, Any]:
    """Return what the documents show of the benchmarks that were measured last, by their names."""
    gathered = {}
    for name in TITLES:
        path = MEASURED / f"{name}.json"
        if path.exists():
            measured = json.loads(path.read_text())
            figures = [{key: _rounded(figure[key]) for key in SHOWN} for figure in measured["figures"]]
            gathered[name] = {"at": measured["at"], "machine": measured["machine"], "figures": figures}
    return gathered


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def kept() -> dict[str, Any]:
    """Return the figures that are kept with the code."""
    found: dict[str, Any] = json.loads(KEPT.read_text())
    return found


def speed_page() -> str:
    """Return ``docs/speed.md``."""
    measured = kept()
    lines = [
        "# How fast it is",
        "",
        "`make figures` writes this page from what `make bench` measured.",
        "",
        "Machines differ, so look at the ratios. Beside each of them stands its floor, measured in the same run and by",
        "turns with it: the very list that a pass asks the broker for (L), the bare requests, bare SQL. Each is a",
        "median; the column after it has the lowest and the highest. Where a target was missed, that is said. What is",
        "said between the tables of runs without a rest, or of others than this one, was measured in November 2026.",
        "",
        "Measure it on a machine of yours with nothing else to do, all or one:",
        "",
        "    make bench",
        "    make bench ONLY=growth",
        "    make figures",
        "",
        "It starts a RabbitMQ, a PostgreSQL and a Redis of its own, and ends them. All of it takes well over an hour,",
        "most of that for making queues. It exits with 1 where a target was missed, and with 2 where something",
        "could not be measured.",
        "",
        "That RabbitMQ has its defaults but for addresses, plugins, and this: its schedulers may move between",
        "cores (`RABBITMQ_SCHEDULER_BIND_TYPE=u`), since other processes are at work there. Bound to them, as by",
        "default, they wait for those. In runs of the registrations alone, eight agents at once registered 324",
        "queues a second with bound ones and 397 with others on SQLite, and 303 and 312 on PostgreSQL.",
        "",
        "## On a large broker",
        "",
        "- `GUARDIAN_SNAPSHOT=prometheus` takes lengths from the Prometheus endpoint of every node, which costs the",
        "  broker a tenth of the list. They lag by seconds. So queues are warned about by them, and none is deleted:",
        "  where one is over its maximum by them, that same pass asks for the list. Once a minute the list is asked",
        "  for in any case, and whenever a node has no figures, more than twenty names are new or gone, or anything",
        "  else is wrong. For ten seconds after it lengths stay as it said, since figures may be older than that.",
        "  Queues with a quote or a backslash in their name wait for that list. Each node has to have the plugin",
        "  `rabbitmq_prometheus`, at a port that can be reached from here.",
        "- Up to twenty guarded vhosts are listed each by itself, two at a time. More of them, or",
        "  `GUARDIAN_VHOSTS=*`, are one list of everything: for large vhosts more than twice the time for each queue.",
        "- `GUARDIAN_SHARD_BY_VHOST=true` gives each vhost passes and lists of its own, which many workers share.",
        "- `GUARDIAN_POLL_SECONDS` is how often there is one.",
        "",
        "[A million queues](a-million-queues.md) says on paper what becomes of these figures then.",
    ]
    machines = _machines(measured)
    lines += ["", *(f"- {day}: {machine}" for day, machine in machines)] if machines else []
    for name, title in TITLES.items():
        lines += ["", f"## {title}", ""]
        if name not in measured:
            lines.append(f"`make bench ONLY={name}` measures it; no figures are kept here yet.")
            continue
        if name == "growth":
            lines += [
                "More than 10,000 are spread over vhosts of 10,000. The queues of the first one belong to Pulse users.",
                "From 10,000 on, each measurement begins after seven seconds of rest: a list wakes every queue's",
                "process, and some five seconds later the broker is busy with putting them back to sleep. A guard that",
                "looks every five seconds may meet that: without the rest, a pass over 50,000 took 4.7 to 5.8 times",
                "what one over 10,000 does. Not all of it is over by then, so the times lie far apart: with the",
                "rest it was 4.2 and 4.4 times in two whole runs on SQLite, and 5.7 and 4.7 times on PostgreSQL.",
                "All 50,000 in one vhost meet no 5.5: RabbitMQ 3.10 alone took 8 to 14 s for the list of such a",
                "vhost. The broker settles first: where 30,000 queues were just made, a list alone took twice as",
                "long for two minutes.",
                "",
            ]
            lines += ["![Seconds of a pass and of the list that it makes, against the number of queues](speed.svg)", ""]
        if name == "deleting":
            lines += [
                "Each measurement begins after seven seconds of rest, as those of the growth do. Without it, in three",
                "runs of the versions before, these passes took 1.03 to 1.35 times what their floors did.",
                "",
                "Where owners are to be told, their mails say who consumed a queue and what was bound to it, and the",
                "floor has these two requests too. Beside the DELETEs, the list and the declares alone, such a pass",
                "takes 1.3 to 1.4 times as long: it meets no 1.2.",
                "",
            ]
        if name == "warned":
            lines += [
                "The target is in seconds, whatever the machine. Two of them have to hold the list and the mails; the",
                "floor of what a mail takes beyond the poll interval is the list and as many bare mails. Where these",
                "alone take near two seconds, the machine is too slow for it.",
                "",
            ]
        if name == "registrations":
            lines += [
                "The eight at once come first, so that each thread of the web server has its connection to the",
                "database. Right after a start some have none yet. In two runs that began so, one after another took",
                "1.25 and 1.26 times the floor on PostgreSQL.",
                "",
            ]
        lines += _table(measured[name]["figures"])
    return "\n".join(lines) + "\n"


def _machines(measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the days and the machines of the figures, each once."""
    return sorted({(one["at"][:10], _machine(one["machine"])) for one in measured.values()})


def _machine(machine: Mapping[str, str]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items())


def _table(figures: Iterable[Figure]) -> list[str]:
    lines = ["| | median | lowest to highest | floor | ratio | target |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for where, group in groupby(figures, key=lambda figure: str(figure["where"])):
        lines.append(f"| **{where}** | | | | | |")
        lines += [_row(figure) for figure in group]
    return lines


def _row(figure: Figure) -> str:
    unit = figure["unit"]
    spread = ""
    if figure["lowest"] != figure["highest"]:
        spread = f"{_number(figure['lowest'], unit)} to {_number(figure['highest'], unit)}"
    ratio = "" if figure["ratio"] is None else f"{figure['ratio']:.2f}"
    target = f"{figure['target']}{', missed' if figure['met'] is False else ''}"
    cells = (figure["what"], _measure(figure["median"], unit), spread, _measure(figure["floor"], unit), ratio, target)
    return f"| {' | '.join(cells)} |"


def _measure(value: float | None, unit: str) -> str:
    return "" if value is None else f"{_number(value, unit)} {unit}".rstrip()


def _number(value: float, unit: str) -> str:
    return f"{value:.3f}" if unit == "s" else f"{value:,.0f}"


# The chart

WIDTH, HEIGHT = 720, 360
LEFT, RIGHT, TOP, BOTTOM = 60, 200, 20, 50
LINES = {
    "SQLite": ("#1f6fb4", "a pass, SQLite"),
    "PostgreSQL": ("#1b7f4b", "a pass, PostgreSQL"),
    "list": ("#8a8a8a", "the list alone (L)"),
}


def chart() -> str:
    """Return ``docs/speed.svg``: the seconds of a pass, and of its list, against the number of queues."""
    series = _series(kept())
    points = [point for one in series.values() for point in one]
    most_queues, most_seconds = max(x for x, _ in points), max(y for _, y in points)

    def at(queues: float, seconds: float) -> tuple[float, float]:
        x = LEFT + queues / most_queues * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - seconds / most_seconds * (HEIGHT - TOP - BOTTOM)
        return round(x, 1), round(y, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="13"'
        ' font-family="sans-serif">',
        "<title>Seconds of a pass and of the list that it makes, against the number of queues</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        x, y = at(share * most_queues, share * most_seconds)
        right, floor = at(most_queues, 0)
        parts += [
            f'<path d="M{LEFT} {y}H{right}" stroke="#e0e0e0"/>',
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end" fill="#333333">{share * most_seconds:.1f} s</text>',
            f'<text x="{x}" y="{floor + 20}" text-anchor="middle" fill="#333333">{share * most_queues:,.0f}</text>',
        ]
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 10}" fill="#333333">queues</text>')
    for number, (name, (colour, words)) in enumerate(LINES.items()):
        places = [at(*point) for point in series.get(name, [])]
        if not places:
            continue
        dashes = ' stroke-dasharray="6 4"' if name == "list" else ""
        path = " ".join(f"{x},{y}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in places]
        y = TOP + 20 + 22 * number
        x = WIDTH - RIGHT + 20
        parts.append(f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts.append(f'<text x="{x + 32}" y="{y}" fill="#333333">{words}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _series(measured: Mapping[str, Any]) -> dict[str, list[tuple[float, float]]]:
    """Return the points of each line: queues and seconds."""
    figures = measured["growth" if "growth" in measured else "steady_pass"]["figures"]
    series = {database: _points(figures, "1 in 10 changed", database) for database in ("SQLite", "PostgreSQL")}
    series["list"] = _points(figures, "1 in 10 changed", "SQLite", of="floor")
    return {name: points for name, points in series.items() if points}


def _points(
    figures: Iterable[Figure], what: str, database: str, of: Literal["median", "floor"] = "median"
) -> list[tuple[float, float]]:
    """Return what was measured of this on a database: the numbers of queues, and of each the seconds."""
    return [
        (float(figure["where"].partition(" queues, ")[0].replace(",", "")), figure[of])
        for figure in figures
        if figure["what"] == what and figure["where"].endswith(f" queues, {database}")
    ]


# A million queues, on paper

MILLION = 1_000_000


def million_page() -> str:
    """Return ``docs/a-million-queues.md``, with what the benchmarks measured."""
    measured = kept()
    text = (PROJECT / "local" / "a-million-queues.md").read_text()
    return text.format_map(_of_a_million(measured))


def _of_a_million(measured: Mapping[str, Any]) -> dict[str, str]:
    """Return the figures that the text names, worked out from those of the largest size that was measured."""
    series = _series(measured)
    database = "PostgreSQL" if "PostgreSQL" in series else "SQLite"
    (few, few_seconds), (many, _) = series[database][0], series[database][-1]
    listings = [
        figure["floor"]
        for figure in measured["growth" if "growth" in measured else "steady_pass"]["figures"]
        if figure["what"] == "1 in 10 changed" and figure["where"].startswith(f"{many:,.0f} queues, ")
    ]
    times = MILLION / many
    own_of, own = max(_points(_all(measured, "s"), "without its listing", database))
    peak = max((figure["median"] for figure in _all(measured, "MB")), default=0.0)
    in_one = [figure for figure in _all(measured, "s") if str(figure["where"]).startswith("one vhost")]
    times_as_long = [figure["ratio"] for figure in in_one]
    scraped = [figure["median"] for figure in _all(measured, "s") if figure["what"] == "the figures alone"]
    return {
        "most": f"{many:,.0f}",
        "list": _span([f"{seconds:.2f}" for seconds in listings]),
        "list_million": _span([f"{seconds * times:.0f}" for seconds in listings]),
        "own": f"{own:.2f} s for {own_of:,.0f}",
        "own_million": f"{own * MILLION / own_of:.0f} s",
        "peak": f"{peak:.0f} MB",
        "peak_million": f"{peak * times / 1000:.0f} GB",
        "scrape": f"{min(scraped):.2f} s for 10,000" if scraped else "not yet",
        "scrape_million": f"{min(scraped) * 100:.0f} s" if scraped else "",
        "one_vhost": f" ({times_as_long[0]:.1f} times from 10,000 to 20,000)" if times_as_long else "",
        "few": f"{few:,.0f}",
        "few_seconds": f"{few_seconds:.2f} s",
        "vhosts": f"{MILLION / few:,.0f}",
        "workers": f"{math.ceil(MILLION / few * few_seconds / 5)}",
        "workers_minute": f"{math.ceil(MILLION / few * few_seconds / 60)}",
        "changed": f"{MILLION // 10:,}",
        "rows_a_second": f"{MILLION // 10 // 5:,}",
    }


def _span(seconds: Iterable[str]) -> str:
    """Return the least and the most of these, or the one that there is."""
    return f"{' to '.join(sorted(set(seconds), key=float))} s"


def _all(measured: Mapping[str, Any], unit: str) -> list[Figure]:
    """Return the figures of passes that have this unit."""
    of_passes = ("steady_pass", "growth", "memory", "prometheus")
    figures = [figure for name in of_passes for figure in measured.get(name, {}).get("figures", ())]
    return [figure for figure in figures if figure["unit"] == unit]


def main() -> None:
    """Take the figures of the benchmarks over; those that weren't measured stay as they are."""
    figures = {**(kept() if KEPT.exists() else {}), **gather()}
    KEPT.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")
    print(f"docs/{KEPT.name}")


if __name__ == "__main__":
    main()
