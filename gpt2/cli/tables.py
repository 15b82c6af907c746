"""Answers as text for people. Sizes in MiB."""

from __future__ import annotations

MiB = 2**20


def mib(size: int) -> str:
    """Bytes as MiB, spelt out; what would read 0.00 MiB as bytes."""
    return f"{size:,} B" if 0 < size < MiB / 200 else f"{size / MiB:,.2f} MiB"


def answer_text(found: dict, title: str) -> str:
    """The table of one answer: verdict, peaks, steps, owners."""
    if not found["peak"]:
        return f"{title}\n{verdict(found)}; nothing was allocated on the card"
    lines = [title, verdict(found), ""]
    lines += [f"  {name:<16} {mib(found[f'peak_{name}_bytes']):>16}" for name in ("allocated", "reserved")]
    lines.append(f"  set by           {request(found['peak'])}")
    lines += ["", f"  {'step':<6}{'peak allocated':>18}{'peak reserved':>18}"]
    lines += [f"  {row['step']:<6}{mib(row['peak_allocated_bytes']):>18}{mib(row['peak_reserved_bytes']):>18}"
              for row in found["per_step"]]
    lines += ["", f"  {'at the peak':<26}{'':>16}  share"]
    total = found["peak_allocated_bytes"] or 1
    lines += [f"  {row['category']:<26}{mib(row['bytes']):>16}  {row['bytes'] / total:6.1%}" for row in found["ledger"]]
    return "\n".join(lines)


def verdict(found: dict) -> str:
    """Fits, or the request that failed."""
    failure = found["out_of_memory"]
    if found["fits"] is None:
        return "as far as the script came"
    return "fits" if failure is None else f"does not fit: runs out at {request(failure)}"


def request(what: dict) -> str:
    """Who asked for how much, where and when."""
    who = " in ".join(filter(None, (what["operator"], what["module"]))) or "a tensor"
    when = f"step {what['step']}" if what["step"] else "before the first step"
    return f"{mib(what['requested_bytes'])} for {who} ({', '.join(filter(None, (what['phase'], when)))})"


def advice_lines(rows: list[dict] | None, what: str) -> list[str]:
    """What would make it fit, cheapest first, and by what rule (`gpt2.study.savings.prices`)."""
    if not rows:
        return []
    fits, none = f"What makes {what} fit, cheapest first", f"Nothing makes {what} fit; everything at once"
    lines = ["", fits if rows[0]["fits"] else none, f"  {'peak allocated':>16}{'peak reserved':>18}"]
    for row in rows:
        lines += [f"  {mib(row['peak_allocated_bytes']):>16}{mib(row['peak_reserved_bytes']):>18}  {row['changes']}",
                  *(f"  {'':>38}{part}" for part in row["price"].split("; "))]
    order = "  The order: time lost, plus a judgement of risk and of the effort of a change; time saved counts as none."
    return lines + ["", *([order] if rows[0]["fits"] else []),
                    "  Times are of each change alone, GPT-2 124M, 8 x 1,024 tokens, fp32."]
