"""Manifests and files of stores, made up for tests."""

from __future__ import annotations

from dataclasses import replace

from thinwire.uses.following.pull.manifest import File, Manifest, StoredVersion


def leg(base, version, nbytes):
    return File(f"patches/{base}-{version}-{nbytes}.safetensors", base, version, nbytes, "0" * 64)


def example(**changes):
    layout = File("layout.json", 0, 0, 10, "a" * 64)
    versions = (StoredVersion(3, 7, 1000.5), StoredVersion(4, 2**64 - 1, 1001.0))
    files = (replace(leg(0, 3, 100), name="keyframes/a.safetensors"), leg(3, 4, 10))
    return replace(Manifest("model", "a" * 32, 1.5, 60.0, "d" * 16, layout, versions, files), **changes)
