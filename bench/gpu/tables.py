"""The tables of the GPU page: each part as it was measured last, beside what it was before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bench.study.tables import DASH, Draw, Row, table

FAILED = "failed"


def _rows(found: Any, part: str, *, before: bool = False) -> list[Row]:
    rows = found["before"]["parts"].get(part, []) if before else found["parts"].get(part, {}).get("rows", [])
    return list(rows)


def _listed(found: Any, part: str, *names: str) -> list[Row]:
    """Return the rows of a part, and by name alone those of before that were not measured again."""
    now = _rows(found, part)
    then = ({n: r[n] for n in names} for r in _rows(found, part, before=True))
    return [*now, *(r for r in then if _matched(now, r, *names) is None)]


def _matched(rows: Iterable[Row], like: Row, *names: str) -> Row | None:
    return next((r for r in rows if all(r.get(n) == like.get(n) for n in names)), None)


def _said(row: Row | None, name: str, form: Callable[[float], str]) -> str:
    if row is None or name not in row:
        return FAILED if row is not None and "error" in row else DASH
    return form(row[name])


def about(found: Any) -> str:
    """Return where each part was measured, and how long it took."""
    then = found["before"]
    rows = [["before", then["device"], then["torch"], f"`{then['commit']}`", DASH]]
    for part, told in found["parts"].items():
        versions = told["machine"].get("torch") or told["machine"].get("versions", {}).get("torch", DASH)
        ended = f"{told['seconds']:.0f} s" + ("" if told["whole"] else ", stopped")
        rows.append([part, told["device"], str(versions), f"`{told['commit']}`", ended])
    return table(["part", "device", "torch", "commit", "took"], rows)


def kernels(found: Any) -> str:
    """Return the codecs' speeds at both shapes, and their share of a copy."""
    now, then = _rows(found, "kernels"), _rows(found, "kernels", before=True)
    rows = []
    for r in (r for r in now if "codec" in r):
        old, fast = _matched(then, r, "codec", "shape"), "{:,.0f}".format
        rows.append(
            [
                f"`{r['codec']}`",
                "×".join(map(str, r["shape"])),
                *(_said(old, f"{way}_gb_s", "{:,.4g}".format) for way in ("encode", "decode")),
                *(_said(r, f"{way}_gb_s", fast) for way in ("encode", "decode", "against")),
                _said(r, "against_share", "{:.1%}".format),
                _said(r, "bits", "{:.2f}".format),
            ]
        )
    head = ["codec", "values", "encode before", "decode before", "encode", "decode", "with reference"]
    return table([*head, "of a copy", "bits a value"], rows)


def pictures(found: Any) -> str:
    """Return the milliseconds of a step for both sizes of the transformer."""
    then, rows = _rows(found, "pictures", before=True), []
    for r in _listed(found, "pictures", "blocks", "recipe") + _rows(found, "pictures_full"):
        rows.append(
            [
                f"{r['blocks'][0]} + {r['blocks'][1]}",
                f"`{r['recipe']}`" if "alone" not in r["recipe"] else r["recipe"],
                _said(_matched(then, r, "blocks", "recipe"), "step_ms", "{:,.0f} ms".format),
                _said(r, "step_ms", "{:,.1f} ms".format),
                _said(r, "last_ms", "{:,.1f} ms".format),
                *(_said(r, name, "{:,.1f} ms".format) for name in ("waited_ms", "coded_ms")),
                _said(r, "message_ms", "{:,.2f} ms".format),
                _said(r, "step_nbytes", lambda n: f"{n / 1e6:,.2f} MB"),
                _said(r, "latents_db", "{:.1f} dB".format),
            ]
        )
    head = ["blocks", "recipe", "a step before", "a step", "the last four", "waiting in these", "coding"]
    return table([*head, "a message's way", "sent a step", "PSNR of latents"], rows)


def replicas(found: Any) -> str:
    """Return a step behind the hook, and what coding takes of it."""
    then, rows = _rows(found, "replicas", before=True), []
    now = _listed(found, "replicas", "recipe")
    gloo = next((r["step_s"] for r in now if r["recipe"] == "gloo" and "step_s" in r), None)
    for r in now:
        rows.append(
            [
                f"`{r['recipe']}`" if r["recipe"] != "gloo" else "DDP over gloo",
                _said(_matched(then, r, "recipe"), "step_s", "{:.2f} s".format),
                _said(r, "step_s", "{:.3f} s".format),
                f"{r['step_s'] / gloo:.2f}×" if gloo and "step_s" in r else DASH,
                _said(r, "coding_s", lambda s: f"{1e3 * s:.0f} ms"),
            ]
        )
    return table(["recipe", "a step before", "a step", "of DDP's", "coding"], rows)


def state(found: Any) -> str:
    """Return how long a version takes to the wire, and into the follower's model."""
    rows = [["before", "the CPU", *_version(_rows(found, "state", before=True)[0])]]
    for r in _rows(found, "state"):
        what = "first version" if r["version"] == 0 else f"change {r['version']}"
        rows.append([what, {"cpu": "the CPU", "cuda": "the GPU"}[r["follower"]], *_version(r)])
    return table(["version", "the follower's model is on", "published", "in the model after", "sent"], rows)


def _version(r: Row) -> list[str]:
    share = f"{r['nbytes'] / 1e6:,.1f} MB of {r['state_bytes'] / 1e6:,.0f}"
    return [f"{r['publish_s']:.2f} s", f"{r['followed_s']:.2f} s", share]


def stages(found: Any) -> str:
    """Return tokens a second over each link, against raw bf16 and fp32."""
    then = _rows(found, "stages", before=True)
    now = _listed(found, "stages", "model", "link", "recipe") + _rows(found, "stages_xl")
    rows = []
    for r in now:
        raw = [_matched(now, {**r, "recipe": way}, "model", "link", "recipe") for way in ("bf16", "fp32")]
        times = [
            f"{r['tokens_s'] / q['tokens_s']:.2f}×"
            if q is not None and "tokens_s" in q and "tokens_s" in r
            else DASH
            for q in raw
        ]
        rows.append(
            [
                r["model"],
                "unlimited" if r["link"] == "none" else r["link"],
                f"`{r['recipe']}`",
                _said(_matched(then, r, "model", "link", "recipe"), "tokens_s", "{:,.0f}".format),
                _said(r, "tokens_s", "{:,.0f}".format),
                *times,
                _said(r, "first_visit_s", "{:.2f} s".format),
            ]
        )
    head = ["model", "link", "recipe", "tokens/s before", "tokens/s", "against bf16", "against fp32"]
    return table([*head, "first visit"], rows)


def links(found: Any) -> str:
    """Return GB/s by size of message."""
    then, rows = _rows(found, "links", before=True), []
    for r in _listed(found, "links", "message_bytes"):
        rows.append(
            [
                f"{r['message_bytes'] / 1e6:,.2f} MB",
                _said(_matched(then, r, "message_bytes"), "gb_s", "{:.2f} GB/s".format),
                _said(r, "gb_s", "{:.2f} GB/s".format),
                _said(r, "cpu_seconds_a_gb", "{:.2f} s".format),
            ]
        )
    return table(["message", "before", "one way", "the sender's CPU time a GB"], rows)


def _measured(draw: Draw, part: str) -> Draw:
    return lambda found: (
        draw(found)
        if _rows(found, part) or _rows(found, part, before=True)
        else "*This is not measured yet.*"
    )


TABLES: dict[str, Draw] = {
    "gpu-about": about,
    **{
        f"gpu-{draw.__name__}": _measured(draw, draw.__name__)
        for draw in (kernels, pictures, replicas, state, stages, links)
    },
}
