"""Bytes that come one after another read as one row of bytes, and are summed up as they come."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.state.patches import pages
from thinwire.state.patches.pages import Pages


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=20), max_size=9),
    st.lists(st.integers(-5, 90) | st.none(), min_size=2, max_size=2),
    st.integers(1, 8),
)
def test_pages_are_cut_and_summed_as_if_they_were_one(
    parts: list[bytes], ends: list[int | None], page: int
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(pages, "PAGE", page)
        found, whole, views = Pages(), b"", list[tuple[memoryview, bytes]]()
        for part in parts:
            found.add(part)
            whole += part
            views.append((found[slice(*ends)], whole[slice(*ends)]))
        assert len(found) == len(whole) and found[:] == whole and found.crc == zlib.crc32(whole)
        assert all(view == expected and view.readonly for view, expected in views)  # what was read stays
