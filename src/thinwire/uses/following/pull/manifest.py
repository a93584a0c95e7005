"""The manifest of a store: which versions there are and which files lead to them, as one JSON file.

It is written last, so what it names is there; a file it does not name is nothing. Whoever reads it trusts
nothing in it: names are of one form, numbers bounded and in order, before any of them is used.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from thinwire.links.security import REMEDY, check_bytes
from thinwire.state.patches.patch import Meta, check_meta, is_time
from thinwire.types import WRONG_VALUES, AuthError, InputError, PayloadError, require
from thinwire.uses.following.state_names import check_text

STATE, LAYOUT = "state.json", "layout.json"
PATCHES, KEYFRAMES = "patches", "keyframes"
FORMAT = "thinwire-shelf/1"
MAX_MANIFEST = 1 << 22  # bytes; a version takes about 400
MAX_LAYOUT = 1 << 24
MAX_VERSIONS = 4096
MAX_NUMBER = 1 << 53  # exact in every reader of JSON
MAX_TEXT = 256  # characters
NAME = re.compile(rf"({PATCHES}|{KEYFRAMES})/[0-9a-z-]{{1,100}}\.safetensors")
_LEG = r"(patches/[0-9]{8,16}-|keyframes/)(?P<version>[0-9]{8,16})-[0-9a-f]{8}\.safetensors"
WRITTEN = re.compile(_LEG)  # what publishers call files; readers take any NAME
HASH, CHECK, LABEL = re.compile("[0-9a-f]{16}"), re.compile("[0-9a-f]{64}"), re.compile("[0-9a-f]{8,64}")
CONTEXT = b"thinwire shelf 1"


@dataclass(frozen=True)
class File:
    """A patch: its relative name, what it leads from (0: nothing) and to, its bytes and its hash."""

    name: str
    base: int
    version: int
    nbytes: int
    check: str


@dataclass(frozen=True)
class StoredVersion:
    """A version: its number, the 64-bit hash of its contents, when it was published [s since the epoch]."""

    number: int
    hash: int
    published: float


@dataclass(frozen=True)
class Manifest:
    """What a store holds. ``written``: the writer's clock [s]; ``lease``: the seconds it may be silent.

    ``meta`` is what was published along with the newest version.
    """

    name: str
    instance: str
    written: float
    lease: float
    digest: str
    layout: File
    versions: tuple[StoredVersion, ...] = ()
    files: tuple[File, ...] = ()
    meta: Meta = field(default_factory=dict)

    @property
    def newest(self) -> StoredVersion | None:
        return self.versions[-1] if self.versions else None

    def pack(self, proof: Proof) -> bytes:
        """Return the manifest as JSON, with its own hash."""
        fields: dict[str, Any] = {"format": FORMAT, "signed": proof.keyed} | asdict(self)
        for version in fields["versions"]:
            version["hash"] = f"{version['hash']:016x}"
        if not self.meta:
            del fields["meta"]  # says nothing
        fields["check"] = proof.of(STATE, _canonical(fields))
        return _canonical(fields)


def check_names(name: str, instance: str) -> None:
    """Raise ``InputError`` for a state's or a publisher's name that no reader would take."""
    check_text(name)
    require(len(name) <= MAX_TEXT, InputError, f"the name {name[:40]!r} is over {MAX_TEXT} characters")
    fits = LABEL.fullmatch(instance) is not None
    require(fits, InputError, f"instance={instance[:70]!r} is not 8 to 64 of the digits 0-9 and a-f")


def unpack(data: bytes, proof: Proof, where: str) -> Manifest:
    """Return the manifest in ``data``, which came from ``where``.

    Errors: ``AuthError`` where just one end has a token, or another one; ``PayloadError`` for anything else
    that is wrong.
    """
    try:
        fields = json.loads(data)
        found, signed, check = fields["format"], fields["signed"], fields.pop("check")
        if found != FORMAT:
            raise PayloadError(f"{where} has format {str(found)[:40]!r}, expected {FORMAT!r}")
        proof.same_side(signed is True, where)
        if not proof.fits(STATE, _canonical(fields), _text(check, CHECK)):
            raise _forged(proof, where)
        return _manifest(fields)
    except WRONG_VALUES as e:
        raise PayloadError(f"{where} is not a manifest: {type(e).__name__}: {str(e)[:100]}") from e


def _forged(proof: Proof, where: str) -> Exception:
    if proof.keyed:
        return AuthError(f"the state at {where} is signed with another token; give both ends the same")
    return PayloadError(f"{where} is damaged: its hash does not fit")


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def _manifest(fields: Any) -> Manifest:
    many = (fields["versions"], fields["files"])
    if any(not isinstance(x, list) or len(x) > 4 * MAX_VERSIONS for x in many):
        raise PayloadError(f"a manifest without lists of at most {4 * MAX_VERSIONS} versions and files")
    versions = tuple(_version(v) for v in fields["versions"])
    numbers = [v.number for v in versions]
    if numbers != sorted(set(numbers)):
        raise PayloadError("a manifest whose versions are not in order")
    known = set(numbers)
    return Manifest(
        name=_name(fields["name"]),
        instance=_text(fields["instance"], LABEL),
        written=_real(fields["written"]),
        lease=_real(fields["lease"]),
        digest=_name(fields["digest"]),
        layout=_file(fields["layout"], re.compile(re.escape(LAYOUT)), MAX_LAYOUT),
        versions=versions,
        files=tuple(_leg(f, known) for f in fields["files"]),
        meta=check_meta(fields.get("meta", {})),
    )


def _version(fields: Any) -> StoredVersion:
    number, digits = _whole(fields["number"], 1), _text(fields["hash"], HASH)
    published = _real(fields["published"])
    if not is_time(published):
        raise PayloadError(f"a version published at {published:g} s since the epoch")
    return StoredVersion(number, int(digits, 16), published)


def _leg(fields: Any, known: set[int]) -> File:
    file = _file(fields, NAME, MAX_NUMBER)
    if not file.base < file.version or file.version not in known or file.base not in known | {0}:
        raise PayloadError(f"a file from version {file.base} to {file.version}, which the manifest lacks")
    return file


def _file(fields: Any, name: re.Pattern[str], limit: int) -> File:
    base, version = _whole(fields["base"], 0), _whole(fields["version"], 0)
    nbytes = _whole(fields["nbytes"], 1, limit)
    return File(_text(fields["name"], re.compile(name)), base, version, nbytes, _text(fields["check"], CHECK))


def _whole(value: Any, low: int, high: int = MAX_NUMBER) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise PayloadError(f"{str(value)[:40]!r} where a whole number in {low}..{high} belongs")
    return value


def _real(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise PayloadError(f"{str(value)[:40]!r} where a number belongs")
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise PayloadError(f"{str(value)[:40]!r} where a text of at most {MAX_TEXT} characters belongs")
    return value


def _text(value: Any, form: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not form.fullmatch(value):
        raise PayloadError(f"{str(value)[:60]!r} is not of the form {form.pattern}")
    return value


class Proof:
    """Makes and checks the hashes of files.

    >>> Proof(None).of("a", b"data") == Proof(b"token").of("a", b"data")
    False
    """

    def __init__(self, token: bytes | None) -> None:
        check_bytes(token)
        self.keyed = token is not None
        self._key = hashlib.blake2b(
            CONTEXT, key=hashlib.blake2b(token or b"").digest(), digest_size=32
        ).digest()

    def of(self, name: str, data: bytes) -> str:
        """Return the hash of the file ``name`` with these bytes: 64 hexadecimal digits."""
        if not self.keyed:
            return hashlib.sha256(data).hexdigest()
        code = hmac.new(self._key, name.encode() + b"\0", hashlib.sha256)  # no name has a zero byte
        code.update(data)
        return code.hexdigest()

    def fits(self, name: str, data: bytes, check: str) -> bool:
        """Return whether ``check`` is the hash of the file."""
        return hmac.compare_digest(self.of(name, data).encode(), check.encode())

    def same_side(self, keyed: bool, where: str) -> None:
        """Raise ``AuthError`` where just one of publisher and reader has a token."""
        if keyed and not self.keyed:
            raise AuthError(f"the state at {where} is signed with a token: {REMEDY}, the publisher's")
        if self.keyed and not keyed:
            raise AuthError(f"the state at {where} is not signed: publish with the token, or read without")
