"""A folder in whatever fsspec reaches: object stores, SFTP, network shares, memory."""

from __future__ import annotations

import posixpath
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from thinwire.files.base import check_size, shown
from thinwire.replacing import FULL, PART
from thinwire.types import InputError, MissingExtra, PayloadError

# Stores where one put makes a whole object or none. Elsewhere a file grows as it is written, so it is
# written under another name and moved.
ONE_PUT = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "tos", "r2", "hf"}
# How such a store says that what would hold its objects is not there. It has no folders, and to make some
# would make that: few may, and a misspelt name is none to make.
NO_BUCKET = re.compile(r"(bucket|container) does not exist|NoSuchBucket|ContainerNotFound", re.IGNORECASE)
# Whoever reads a store looks again, so its library need not try for minutes before it says what is wrong.
BRIEF = {"connect_timeout": 10, "retries": {"mode": "standard", "total_max_attempts": 2}}
SFTP = {"sftp", "ssh"}
IDLE = 60.0  # seconds after which nobody relies on a connection: servers and routers end what is idle
# What is said of a file by a store that can be reached.
ANSWERS = (
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    PayloadError,
)


class RemoteFolder:
    """Files under a URL, by fsspec; ``options`` go to its file system. For any number of threads.

    Some file systems connect once, when they are made: after an error that may be the end of a connection
    the next attempt is made with a new one. On one connection, as SFTP's and FTP's, answers to two threads
    get lost or mixed up, so each has one to itself. fsspec's asynchronous ones serve all threads at once.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.where = shown(url)
        self._url, self._options = url, options
        system, self._root = _open(url, self.where, options)
        # fsspec itself gives each thread another file system unless it is of this kind. A chain's first link
        # may be and the one that connects not.
        self._shared = bool(system.async_impl) and "::" not in url
        self._turn = threading.Lock()
        self._free = [(system, time.monotonic())]  # since when; the one that was used last is the last
        self._one_put = bool(_protocols(system) & ONE_PUT)
        self._has_folders = not (_protocols(system) | {_schemes(url)[-1]}) & ONE_PUT
        self._answered = False

    def read(self, name: str, limit: int) -> bytes:
        path = self._path(name)
        with self._lent("read") as system:
            size = system.size(path)
            if size is not None:
                check_size(size, limit, f"{self.where}/{name}")
            # One byte more than may be there: a file that has grown since is noticed, not taken in whole.
            data: bytes = system.cat_file(path, start=0, end=min(limit, size or limit) + 1)
        check_size(len(data), limit, f"{self.where}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        path = self._path(name)
        with self._lent("written") as system:
            if self._has_folders:
                system.makedirs(posixpath.dirname(path), exist_ok=True)
            if self._one_put:
                system.pipe_file(path, data)
            else:
                self._move_in(system, path, data)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError), self._lent("cleared") as system:
            system.rm_file(self._path(name))

    def sizes(self, folder: str) -> dict[str, int | None]:
        path = self._path(folder)
        found: list[dict[str, Any]] = []
        with suppress(FileNotFoundError), self._lent("listed") as system:
            system.invalidate_cache(path)
            found = system.ls(path, detail=True)
        return {posixpath.join(folder, posixpath.basename(f["name"].rstrip("/"))): _size(f) for f in found}

    def _move_in(self, system: Any, path: str, data: bytes) -> None:
        temporary = _temporary(path)
        try:
            system.pipe_file(temporary, data)
            try:
                system.mv(temporary, path)
            except OSError as e:  # some servers rename onto no file that is there
                if not _in_the_way(system, path, e):
                    raise
                self._exchange(system, temporary, path)
        except BaseException:
            with suppress(Exception):
                system.rm_file(temporary)
            raise

    def _exchange(self, system: Any, temporary: str, path: str) -> None:
        """Move a file to where another is, which goes aside and comes back if the new one cannot be there."""
        old = _temporary(path)
        try:
            system.mv(path, old)
            system.mv(temporary, path)
        except BaseException:
            with suppress(Exception):
                self._put_back(old, path)
            raise
        with suppress(Exception):  # a file too many does no harm
            system.rm_file(old)

    def _put_back(self, old: str, path: str) -> None:
        """Move a file back over a connection of its own, as the one in use may just have ended."""
        system, _ = _connect(self._url, self._options)
        try:
            if not system.exists(path):
                system.mv(old, path)
        finally:
            _end(system)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _lent(self, done: str) -> Iterator[Any]:
        """Lend the file system; errors of classes of its own, which most have, become ``OSError``."""
        system, good = None, False
        try:
            system = self._taken()
            yield system
            good = self._answered = True
        except ANSWERS as e:
            good = True
            self._check_bucket(e)
            raise
        except OSError:
            raise
        except Exception as e:
            raise OSError(f"{self.where} cannot be {done}: {str(e) or type(e).__name__}") from e
        finally:
            if system is not None:
                self._give_back(system, good)

    def _check_bucket(self, error: Exception) -> None:
        """Raise ``InputError`` where the bucket was never there; one that was may come back."""
        missing = NO_BUCKET.search(f"{error} {error.__cause__}")
        if missing and not self._answered:
            bucket = urlsplit(self.where.rpartition("::")[2]).netloc
            told = f"the bucket {bucket!r} does not exist, so nothing is at {self.where}"
            raise InputError(f"{told}; check the name, or make the bucket first") from error
        self._answered = self._answered or not missing

    def _taken(self) -> Any:
        """Return a file system that no other thread has, unless all may share one."""
        with self._turn:
            if self._shared:
                self._free = self._free or [(self._made(), 0.0)]
                return self._free[-1][0]
            now = time.monotonic()
            fresh = [(system, since) for system, since in self._free if now - since < IDLE]
            old, self._free = self._free[: -len(fresh) or None], fresh  # they came back in that order
            found = fresh.pop()[0] if fresh else None
        for system, _ in old:
            _end(system)
        return self._made() if found is None else found

    def _made(self) -> Any:
        return _connect(self._url, self._options)[0]

    def _give_back(self, system: Any, good: bool) -> None:
        """Keep a file system for whoever comes next, unless its connection may have ended."""
        with self._turn:
            if self._shared and not good:
                self._free = [free for free in self._free if free[0] is not system]
            elif good and not self._shared:
                self._free.append((system, time.monotonic()))
        if not good and not self._shared:
            _end(system)


def _protocols(system: Any) -> set[str]:
    return {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)


def _end(system: Any) -> None:
    """Close an SFTP connection: its thread would keep it. Any other ends when nobody refers to it."""
    if _protocols(system) & SFTP:
        with suppress(Exception):
            system.client.close()


def _size(listed: dict[str, Any]) -> int | None:
    return listed.get("size") if listed.get("type", "file") == "file" else None


def _temporary(path: str) -> str:
    return f"{path}.{uuid4().hex[:8]}{PART}"


def _in_the_way(system: Any, path: str, error: OSError) -> bool:
    """Return whether what is at ``path`` may be why nothing was moved there: no full disk, no lost line."""
    other = isinstance(error, TimeoutError | ConnectionError) or error.errno in FULL
    return not other and bool(system.exists(path))


def _open(url: str, where: str, options: dict[str, Any]) -> tuple[Any, str]:
    try:
        return _connect(url, options)
    except ImportError as e:
        if e.name == "fsspec":
            raise MissingExtra(f"{where} needs fsspec: pip install 'thinwire[store]'") from e
        raise MissingExtra(f"{where} needs one more package: {e}") from e  # fsspec's text names it
    except Exception as e:
        raise InputError(f"cannot open the store {where} ({e}); check the URL and its options") from e


def _schemes(url: str) -> list[str]:
    """Return what each link of a chain is called, or what a URL alone is."""
    first, *links = url.split("::")
    return [first.partition("://")[0], *(link.partition("://")[0] for link in links if "://" in link)]


def _settled(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of one link: a file system of its own, which soon says that nothing answers it."""
    brief = {"config_kwargs": BRIEF | options.get("config_kwargs", {})} if name in ("s3", "s3a") else {}
    return options | brief | {"skip_instance_cache": True}


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """Return a file system that nobody else uses, as its connection may end, and the path in it."""
    import fsspec

    first, *links = _schemes(url)
    own = {name: _settled(name, options.get(name, {})) for name in links}
    system, root = fsspec.core.url_to_fs(url, **_settled(first, options) | own)
    # Not by an option: file systems that know no listings, such as SFTP's, take it for one of the connection.
    with suppress(AttributeError):
        system.dircache.use_listings_cache = False
    return system, root.rstrip("/")
