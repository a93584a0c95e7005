"""Manifests and wrapped patches: round trips, proofs, hostile and damaged bytes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from each import each
from following import small
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from store_examples import example, leg

from thinwire.files.safetensors import unwrap, wrap
from thinwire.state.layout import Layout
from thinwire.types import AuthError, PayloadError
from thinwire.uses.following.pull import manifest as manifests
from thinwire.uses.following.pull.manifest import File, Manifest, Proof, StoredVersion, unpack
from thinwire.uses.following.pull.manifest import unpack as unpack_manifest

TOKENS = [None, b"token"]


@each("token", TOKENS)
def test_a_manifest_reads_back(token):
    proof = Proof(token)
    for known in (example(), example(meta={"step": 3, "loss": 0.1})):
        assert unpack(known.pack(proof), proof, "here") == known
    assert example().newest.number == 4
    assert example(versions=(), files=()).newest is None


def test_a_proof_is_for_one_name_one_token_and_one_content():
    proofs = {Proof(t).of(name, data) for t in (b"a", b"b") for name in "xy" for data in (b"1", b"2")}
    assert len(proofs) == 8
    assert Proof(b"a").fits("x", b"1", Proof(b"a").of("x", b"1"))


def test_a_token_at_one_end_only_or_another_one_is_refused():
    with pytest.raises(AuthError, match="signed with a token"):
        unpack(example().pack(Proof(b"a")), Proof(None), "here")
    with pytest.raises(AuthError, match="not signed"):
        unpack(example().pack(Proof(None)), Proof(b"a"), "here")
    with pytest.raises(AuthError, match="another token"):
        unpack(example().pack(Proof(b"a")), Proof(b"b"), "here")


def test_an_unsigned_change_to_a_signed_manifest_is_refused():
    fields = json.loads(example().pack(Proof(b"a")))
    fields["versions"][0]["published"] += 1
    with pytest.raises(AuthError):
        unpack(json.dumps(fields).encode(), Proof(b"a"), "here")


HOSTILE = [
    ("files", [asdict(leg(3, 4, 10)) | {"name": name}])
    for name in (
        "../a",
        "/etc/passwd",
        "patches/../../a.safetensors",
        "patches/a.safetensors\n",
        "patches/A",
        7,
    )
] + [
    ("files", [asdict(leg(base, version, 10))]) for base, version in ((4, 3), (3, 3), (1, 4), (3, 5), (-1, 4))
]
HOSTILE += [("files", [asdict(leg(3, 4, size))]) for size in (0, -1, 2**60, 1.5, True, "1", None)]
HOSTILE += [("files", {}), ("files", [7]), ("files", None), ("files", [{}] * 100_000), ("versions", [{}])]
HOSTILE += [("name", "x" * 1000), ("name", "a\x1b[0m"), ("instance", "../.."), ("written", float("nan"))]
HOSTILE += [("meta", meta) for meta in (None, [1], {"a": [1]}, {"a": "\x1b[0m"}, {"a": "x" * (1 << 16)})]
HOSTILE += [("lease", "1"), ("digest", 3), ("layout", {}), ("check", "0" * 64), ("check", None)]
HOSTILE += [("format", "thinwire-shelf/2"), ("versions", [asdict(v) for v in example().versions[::-1]])]


@each(("field", "value"), HOSTILE)
def test_nonsense_in_a_manifest_is_a_payload_error(field, value):
    """Its hash made to fit: whoever writes the manifest can do that where there is no token."""
    proof = Proof(None)
    fields = json.loads(example().pack(proof)) | {field: value}
    if field == "versions":
        fields["versions"] = [v | {"hash": "0" * 16} for v in value]
    if field != "check":
        del fields["check"]
        fields["check"] = proof.of(manifests.STATE, manifests._canonical(fields))
    with pytest.raises(PayloadError):
        unpack(json.dumps(fields).encode(), proof, "here")


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_bytes_that_are_no_manifest_are_a_payload_error(data):
    with pytest.raises(PayloadError):
        unpack(data, Proof(None), "here")


@each("data", [b"[" * 100_000, b"9" * 10_000, b'{"a":' * 50_000, b"null", b"\xff"])
def test_deep_and_long_json_is_a_payload_error(data):
    with pytest.raises(PayloadError):
        unpack(data, Proof(None), "here")


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_manifest_is_never_taken(place, value):
    data = bytearray(example().pack(Proof(b"a")))
    place %= len(data)
    if data[place] != value:
        data[place] = value
        try:
            assert unpack(bytes(data), Proof(b"a"), "here") == example()  # the same JSON, written otherwise
        except (PayloadError, AuthError):
            pass


def test_a_wrapped_patch_is_a_safetensors_file(tmp_path):
    data = wrap(b"\x01\x02\x03", {"version": "4"})
    assert bytes(unwrap(data)) == b"\x01\x02\x03"
    (tmp_path / "a.safetensors").write_bytes(data)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        assert file.get_tensor("patch").tolist() == [1, 2, 3]
        assert file.metadata() == {"version": "4"}


@settings(deadline=None)
@given(st.binary(max_size=100))
def test_bytes_that_wrap_no_patch_are_a_payload_error(data):
    with pytest.raises(PayloadError):
        unwrap(data)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_wrapping_gives_a_payload_error_or_bytes_of_the_file(place, value):
    data = bytearray(wrap(b"body", {"a": "b"}))
    data[place % len(data)] = value
    try:
        assert len(unwrap(bytes(data))) == 4
    except PayloadError:
        pass


@pytest.mark.parametrize("published", [1e308, -1.0, float(1 << 40)])
def test_a_manifest_with_a_time_that_is_none_is_refused(published: float, tmp_path: Path) -> None:
    layout = Layout.of(small())
    file = File("layout.json", 0, 0, 10, "a" * 64)
    version = StoredVersion(1, 7, published)
    manifest = Manifest("state", "ab" * 16, 1.0, 60.0, layout.digest, file, (version,))
    with pytest.raises(PayloadError, match="published at"):
        unpack_manifest(manifest.pack(Proof(None)), Proof(None), "here")
